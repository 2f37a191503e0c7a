"""Hooks declare flags of their own, which are parsed, shown, bounded and printed as the product's."""

from __future__ import annotations

import asyncio
import pickle
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from test_config import argv, checked, run_args, startable_args  # noqa: F401

from megatron_bridge.flags import public_values
from slime_retool.config import Config, parse_config
from slime_retool.config.printable import wandb_settings
from slime_retool.errors import ConfigError
from slime_retool.protocols import load_function, load_module
from slime_retool.train import main as train
from slime_retool.types import Sample

ROOT = Path(__file__).resolve().parents[1]
TASK = '''
from dataclasses import dataclass
from slime_retool.config import flag

@dataclass(frozen=True)
class HookArgs:
    """Task {name}."""
    {name}_bonus: float = flag(1.0, min=0, help="Added.")
    {name}_key: str | None = flag(None, secret=True, help="Key.")

async def reward_func(args, sample, **kwargs): return args.hook(HookArgs).{name}_bonus
async def generate(args, sample, sampling_params): return sample
def advantage(inputs): return inputs.args.hook(HookArgs).{name}_bonus
'''


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the path for modules of hooks; with `one` and `two` in it."""
    folder = tmp_path / "hooks"
    folder.mkdir()
    for name in ("one", "two"):
        (folder / f"{name}.py").write_text(TASK.replace("{name}", name))
    monkeypatch.syspath_prepend(str(folder))
    before = set(sys.modules)
    yield folder
    for name in set(sys.modules) - before:
        if str(sys.modules[name].__dict__.get("__file__", "")).startswith(str(folder)):
            del sys.modules[name]


def declares(folder: Path, name: str, field: str, *, decorator: str = "@dataclass(frozen=True)") -> str:
    """A module whose `HookArgs` has this field; returns its reward's path."""
    source = TASK.replace("{name}", name).replace("@dataclass(frozen=True)", decorator)
    (folder / f"{name}.py").write_text(source.replace(f"{name}_bonus", field))
    return f"{name}.reward_func"


def test_values_are_read_by_the_class_that_declares_them(tasks: Path):
    words = ["--custom-rm-path", "one.reward_func", "--custom-generate-function-path", "two.generate"]
    config = parse_config([*words, "--one-bonus", "2"])
    one, two = load_module("one.x").HookArgs, load_module("two.x").HookArgs
    assert config.hook(one) == one(2.0, None) and config.hook(two) == two(1.0, None)
    assert public_values(*config.hook_args) == {"one_bonus": 2.0, "two_bonus": 1.0}
    assert asyncio.run(load_function("one.reward_func")(config, Sample("q"))) == 2.0


def test_two_hooks_of_one_module_and_of_modules_that_share_a_class_declare_its_flags_once(tasks: Path):
    (tasks / "mine.py").write_text("from one import HookArgs, generate")
    for generate in ("one.generate", "mine.generate"):
        words = ["--custom-rm-path", "one.reward_func", "--custom-generate-function-path", generate]
        config = parse_config([*words, "--one-bonus", "3"])
        assert config.hook_args == (load_module("one.x").HookArgs(3.0, None),)


def test_a_hook_whose_path_names_no_module_with_flags_has_its_defaults(tasks: Path):
    assert Config().hook(load_module("one.x").HookArgs).one_bonus == 1.0


@pytest.mark.parametrize(
    ("field", "decorator", "message"),
    [
        ("lr", "@dataclass(frozen=True)", r"mine.HookArgs: argument --lr: conflicting option string: --lr; give"),
        ("one_bonus", "@dataclass(frozen=True)", "conflicting option string: --one-bonus; give its field"),
        ("mine", "@dataclass", "mine.HookArgs must be a frozen dataclass"),
        ("mine", "", "mine.HookArgs must be a frozen dataclass"),
    ],
    ids=["the product's", "another hook's", "not frozen", "no dataclass"],
)
def test_flags_that_cannot_be_added_are_refused(field: str, decorator: str, message: str, tasks: Path):
    mine = declares(tasks, "mine", field, decorator=decorator)
    with pytest.raises(ConfigError, match=message):
        parse_config(["--custom-generate-function-path", "one.generate", "--custom-rm-path", mine])


def test_a_field_that_is_no_flag_is_refused(tasks: Path):
    (tasks / "mine.py").write_text(TASK.replace("{name}", "mine").replace("    mine_key", "    n: int = 3\n    key"))
    with pytest.raises(ConfigError, match="and each of its fields a flag"):
        parse_config(["--custom-rm-path", "mine.reward_func"])


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["--custom-rm-path", "one.reward_func"], "no HookArgs of one declares it"),
        ([], "a hook's own flags need the hook's path"),
        (["--custom-rm-path", "nowhere.reward_func"], "cannot import 'nowhere' .*; is its folder on PYTHONPATH?"),
    ],
)
def test_a_flag_that_no_hook_declares_is_unknown(words: list[str], hint: str, tasks: Path, capsys):
    with pytest.raises(SystemExit) as ended:
        parse_config([*words, "--shape-tool-use", "calls"])
    error = capsys.readouterr().err
    assert ended.value.code == 2 and error.count("\n") == 1
    assert re.search(f"^slime_retool.train: error: unknown flag --shape-tool-use; .*; .*{hint}", error)


def test_values_out_of_a_hooks_bounds_are_refused(tasks: Path, run_args):  # noqa: F811
    args = run_args | {"--custom-rm-path": "one.reward_func"}
    assert public_values(*checked(args).hook_args) == {"one_bonus": 1.0}
    with pytest.raises(ConfigError, match="^--one-bonus must be at least 0, got -1.0$"):
        checked(args | {"--one-bonus": "-1"})


def test_help_shows_a_hooks_flags_in_a_group_of_their_own(tasks: Path, capsys):
    with pytest.raises(SystemExit):
        parse_config(["--help", "--custom-rm-path", "one.reward_func"])
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.endswith("Task one: --one-bonus FLOAT Added. (default: 1.0; at least 0) --one-key STR Key.")


def test_a_dry_run_prints_a_hooks_flags_but_no_secret(tasks: Path, startable_args, capsys):  # noqa: F811
    words = argv(startable_args | {"--custom-rm-path": "one.reward_func", "--one-bonus": "2", "--one-key": "s3cret"})
    assert train([*words, "--dry-run"]) == 0
    out, error = capsys.readouterr()
    assert "s3cret" not in out and "slime_retool.train: --one-key is a secret and not printed\n" in error
    printed = parse_config(shlex.split(out.replace("\\\n", " "))[3:])
    assert public_values(*printed.hook_args) == {"one_bonus": 2.0} and "s3cret" not in repr(parse_config(words))


def test_what_is_shipped_to_actors_needs_no_module_of_a_hook(tasks: Path):
    config = parse_config(["--custom-rm-path", "one.reward_func", "--one-bonus", "2", "--seed", "7"])
    read = "import pickle, sys; print(pickle.load(sys.stdin.buffer).seed)"

    def elsewhere(config: Config) -> subprocess.CompletedProcess[bytes]:
        command = [sys.executable, "-c", read]
        return subprocess.run(command, input=pickle.dumps(config), cwd=ROOT, capture_output=True, timeout=60)

    assert elsewhere(config.for_actors()).stdout == b"7\n"
    assert b"No module named 'one'" in elsewhere(config).stderr
    assert pickle.loads(pickle.dumps(config)) == config


@pytest.mark.parametrize(
    "words",
    [
        ["--custom-rm-path", "one.reward_func"],
        ["--advantage-estimator", "one.advantage"],
        ["--loss-type", "one.advantage"],
        ["--update-weight-transport", "one.HookArgs"],
    ],
    ids=lambda words: words[0],
)
def test_trainers_read_the_values_that_were_given(words: list[str], tasks: Path):
    config = parse_config([*words, "--one-bonus", "7", "--one-key", "s3cret"])
    given = load_module("one.x").HookArgs(7.0, "s3cret")
    shipped = pickle.loads(pickle.dumps(config.for_actors().for_actors()))
    assert config.hook(type(given)) == shipped.hook(type(given)) == given
    assert shipped.hook(load_module("two.x").HookArgs).two_bonus == 1.0 and "s3cret" not in repr(shipped)


def test_names_of_the_products_own_are_no_modules(tasks: Path):
    words = ["--advantage-estimator", "ppo", "--loss-type", "policy_loss", "--update-weight-transport", "disk"]
    assert parse_config(words).hook_args == ()


def test_wandb_is_told_a_hooks_settings_but_no_secret(tasks: Path, tmp_path: Path):
    words = ["--custom-rm-path", "one.reward_func", "--one-key", "s3cret", "--wandb-key", "k", "--use-wandb"]
    told = wandb_settings(parse_config([*words, "--output-dir", str(tmp_path), "--lr", "3"]))["config"]
    assert (told["one_bonus"], told["lr"], told["sglang_server_flags"]) == (1.0, 3.0, {})
    assert not {"one_key", "wandb_key", "hook_args"} & set(told)


def test_the_recipes_flags_are_those_of_its_hooks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "retool"))
    hooks = ["--custom-generate-function-path", "generate_with_retool.generate"]
    for words in (hooks, ["--custom-rm-path", "generate_with_retool.reward_func"]):
        config = parse_config([*words, "--shape-tool-use", "calls", "--format-penalty", "0.5"])
        assert public_values(*config.hook_args) == {"shape_tool_use": "calls", "format_penalty": 0.5}


def test_the_task_of_the_readme_has_a_flag_of_its_own(tasks: Path):
    (block,) = re.findall(r"^```python\n(# my_task\.py\n.*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S)
    (tasks / "my_task.py").write_text(block)
    config = parse_config(["--custom-rm-path", "my_task.reward_func", "--wrong", "-0.5"])
    reward = load_function("my_task.reward_func")
    answers = [asyncio.run(reward(config, Sample("q", label="2", response=text))) for text in ("It is 2.", "3")]
    assert answers == [1.0, -0.5]
    generate, sample = load_function("my_task.generate", "--custom-generate-function-path"), Sample("q")
    assert asyncio.run(generate(config, sample, {})) is sample
