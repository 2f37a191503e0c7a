"""The documentation is true: links lead somewhere, commands and flags exist, metrics are written, blocks run."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
import shlex
import subprocess
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from slime_retool.cli import COMMANDS
from slime_retool.config import Config
from slime_retool.config.parse import build_parser, parse_config
from slime_retool.metric_table import find_metric, metrics
from slime_retool.types import Sample

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "AGENTS.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("examples/*/README.md"))]
PAGES += sorted(DOCS.rglob("*.md"))
SOURCES = [path for folder in ("slime_retool", "megatron_bridge", "tools") for path in (ROOT / folder).rglob("*.py")]
NAMES = "rollout|train|critic|mismatch|tis|eval|val-core|val-aux|perf|memory"
OTHER_PROGRAMS = {"pip", "source", "export", "ray", "hf", "cd", "mkdir"}
OTHER_FLAGS = {
    "--head", "--port", "--address",  # ray start
    "--local-dir", "--repo-type",  # hf download
    "--no-deps", "--help", "--version",  # pip
    "--security-opt",  # docker run
    "--archive", "--delete",  # rsync
    "--pid",  # py-spy
    "--enable-return-routed-experts",  # sglang.launch_server
    "--pp",  # of benchmarks/train_step.py, which makes its flags of sizes in a loop
}  # fmt: skip
DECLARED = re.compile(r"^    (\w+): .* = flag\(", re.M)
"""A flag of a hook, on a page or in a recipe."""
STARTS = ("flags", "data", "ray", "sglang_flags", "engines", "trainers", "router_and_weights", "evaluation")
BUILT = {
    "aborted_ratio": "{status.value}_ratio",
    **dict.fromkeys(("engine_weights_gib", "engine_kv_cache_gib", "engine_graphs_gib"), "memory/engine_{name}"),
    **{f"{name}_seconds": f'laps("{name}")' for name in STARTS},
}
"""Part of a metric's name that is put together -> the code that does it."""
RUN_ELSEWHERE = {
    ("docs/data.md", "jsonl"): "test_data_docs.py",
    ("docs/extending.md", "python"): "test_extending.py",
    ("docs/extending.md", "diff"): "test_extending.py",
    ("docs/tools.md", "python"): "test_tool_docs.py",
    ("docs/your_own.md", "python"): "test_your_own.py",
    ("docs/your_own.md", "jsonl"): "test_your_own.py",
}
"""Blocks of a language on a page -> the test that takes them from there and runs them."""


def generate_module():
    """docs/generate.py, which is no part of a package."""
    spec = importlib.util.spec_from_file_location("docs_generate", DOCS / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks_of(page: Path, language: str) -> list[str]:
    found = re.findall(rf"^( *)```{language}\n(.*?)^ *```$", page.read_text(encoding="utf-8"), re.M | re.S)
    return [textwrap.dedent(indent + body if indent else body) for indent, body in found]


def commands_of(block: str) -> Iterator[list[str]]:
    """The words of each command of a shell block, assignments before it left out."""
    pending = ""
    for line in block.replace("\\\n", " ").splitlines():
        pending = f"{pending}\n{line}" if pending else line
        try:
            words = shlex.split(pending, comments=True)
        except ValueError:  # a quote that goes on in the next line
            continue
        pending = ""
        if words[:1] == ["for"] and "do" in words:
            words = words[words.index("do") + 1 :]
        while words and re.match(r"^[A-Za-z_]\w*=", words[0]):
            words.pop(0)
        if words:
            yield words
    assert not pending, pending


@cache
def options_of(command: str) -> frozenset[str]:
    parser = build_parser() if command == "train" else generate_module().parser_of(COMMANDS[command][0])
    return frozenset(parser._option_string_actions)


@cache
def flags_in(script: Path) -> frozenset[str]:
    """Flags that a script names: those that it declares, and for shell scripts those that it handles."""
    return frozenset(re.findall(r"(?<![\w-])--[a-z][\w-]*", script.read_text(encoding="utf-8")))


def declared_in(text: str) -> frozenset[str]:
    return frozenset("--" + name.replace("_", "-") for name in DECLARED.findall(text))


@cache
def make_targets() -> set[str]:
    done = subprocess.run(["make", "-qp", "-C", str(ROOT)], capture_output=True, text=True)
    return set(re.findall(r"^([a-z][\w.-]*):", done.stdout, re.M))


def files_of(text: str) -> frozenset[str]:
    """Python files that a page has the reader write: their first line is their name."""
    return frozenset(re.findall(r"^```python\n# (\w+\.py)$", text, re.M))


def mistakes_in(
    words: list[str], own_flags: frozenset[str] = frozenset(), own_files: frozenset[str] = frozenset()
) -> Iterator[str]:
    """What of a command does not exist; flags that the page's own hooks declare and its own files do."""
    program, *rest = words
    given = {word.partition("=")[0] for word in rest if word.startswith("--") and word != "--"}
    given = {word for word in given if not word.startswith("--sglang-")} - {"--help", "--version"} - own_flags
    if program == "slime-retool":
        command = next((name for n in (2, 1) if (name := " ".join(rest[:n])) in COMMANDS), None)
        if command is not None:
            yield from (f"{command} has no {flag}" for flag in given - options_of(command))
        elif set(rest) - {"--help", "--version", "COMMAND"}:
            yield f"no command {rest[:2]}"
    elif program in ("python", "bash") and rest[:2] != ["-m", "slime_retool.train"]:
        script = ROOT / rest[0]
        converters = {"tools/convert_torch_dist_to_hf.py": "to-hf", "tools/convert_hf_to_torch_dist.py": "to-megatron"}
        if rest[0] in converters:
            given -= options_of(f"convert {converters[rest[0]]}")
        if rest[0] in own_files:
            yield from (f"{rest[0]} has no {flag}" for flag in given)
        elif "ANY_SCRIPT" not in rest[0] and not script.is_file():
            yield f"no file {rest[0]}"
        elif script.is_file():
            yield from (f"{rest[0]} has no {flag}" for flag in given - flags_in(script) - options_of("train"))
    elif program == "python":
        yield from (f"train has no {flag}" for flag in given - options_of("train"))
    elif program == "make":
        yield from (f"no target {word}" for word in rest if "=" not in word and word not in make_targets() | given)
    elif program not in OTHER_PROGRAMS and not program.endswith("()"):
        yield f"unknown program {program}"


SHELL_BLOCKS = [(name_of(page), block) for page in PAGES for block in blocks_of(page, "bash")]
BLOCK_NAMES = [f"{page}-{number}" for number, (page, _) in enumerate(SHELL_BLOCKS)]


@pytest.mark.parametrize(("page", "block"), SHELL_BLOCKS, ids=BLOCK_NAMES)
def test_each_command_of_a_shell_block_exists_with_its_flags(page: str, block: str) -> None:
    syntax = subprocess.run(["bash", "-n"], input=block, capture_output=True, text=True)
    assert syntax.returncode == 0, syntax.stderr
    text = (ROOT / page).read_text(encoding="utf-8")
    own = declared_in(text), files_of(text)
    assert [mistake for words in commands_of(block) for mistake in mistakes_in(words, *own)] == []


def test_a_command_that_does_not_exist_would_be_found() -> None:
    block = (
        "slime-retool fly\nslime-retool eval --speed 3\npython benchmarks/none.py\nX=1 make nothing  # --not-this\n"
        "python benchmarks/rl_step.py --mod x -- --colocat\nwget x\nslime-retool view 'a\nb' \\\n --out x --html\n"
    )
    assert [mistake for words in commands_of(block) for mistake in sorted(mistakes_in(words))] == [
        "no command ['fly']", "eval has no --speed", "no file benchmarks/none.py", "no target nothing",
        "benchmarks/rl_step.py has no --colocat", "benchmarks/rl_step.py has no --mod", "unknown program wget",
        "view has no --html",
    ]  # fmt: skip


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_flag_that_is_named_exists(page: Path) -> None:
    known = {flag for command in COMMANDS for flag in options_of(command)} | OTHER_FLAGS
    for pattern in ("examples/**/*.py", "examples/**/*.sh", "benchmarks/*.py", "tests/browser/conftest.py"):
        known |= {flag for script in ROOT.glob(pattern) for flag in flags_in(script)}
    text = re.sub(r"\]\([^)]*\)|^```diff\n.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9](?![\w-])", text))
    for hooks in [page, *(ROOT / "slime_retool/recipes").rglob("*.py")]:
        known |= declared_in(hooks.read_text(encoding="utf-8"))
    assert {flag for flag in named - known if not flag.startswith("--sglang-")} == set()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_metric_that_is_named_is_written(page: Path) -> None:
    table = {metric.name for metric in metrics()}
    wrong = []
    for named in re.findall(rf"`((?:{NAMES})/[^`\s]*)`", page.read_text(encoding="utf-8")):
        if re.search(r"\.(py|sh|md|jsonl?)|/$", named):
            continue
        pattern = re.escape(named).replace(r"\*", ".*")
        if not (find_metric(named) or any(re.fullmatch(pattern, name) for name in table)):
            wrong.append(named)
    assert wrong == []


def test_every_metric_of_the_code_is_in_the_table() -> None:
    table = [re.sub("<[a-z]+>", "0", metric.name) for metric in metrics()]
    missing = []
    for path in SOURCES:
        if path.name == "metric_table.py":
            continue
        for literal in re.findall(rf'f?"((?:{NAMES})/[^"\s]*)"', path.read_text(encoding="utf-8")):
            made = re.sub(r"\{[^}]*\}", "0", literal)
            pattern = "(.+)".join(re.escape(part) for part in re.split(r"\{[^}]*\}", literal))
            if not (find_metric(made) or any(re.fullmatch(pattern, name) for name in table)):
                missing.append(f"{path.name}: {literal}")
    assert missing == []


def test_every_metric_of_the_table_is_in_the_code() -> None:
    code = "\n".join(path.read_text(encoding="utf-8") for path in SOURCES if path.name != "metric_table.py")
    words = {metric.name: re.split(r"/|<[a-z]+>", metric.name)[-1].strip("@_") for metric in metrics()}
    built = [part for part, place in BUILT.items() if place in code]
    assert built == list(BUILT)
    assert [n for n, word in words.items() if word not in code and not any(part in word for part in built)] == []


def test_every_metric_of_a_run_is_in_the_table() -> None:
    written = {name for file in (ROOT / "tests/data").rglob("metrics.jsonl") for name in keys_of(file)}
    assert len(written) > 60
    assert [name for name in sorted(written - {"step", "time"}) if find_metric(name) is None] == []


def keys_of(file: Path) -> set[str]:
    return {name for line in file.read_text(encoding="utf-8").splitlines() for name in json.loads(line)}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    text = re.sub(r"^ *```.*?^ *```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?:|mailto:", target):
            continue
        file, _, anchor = target.partition("#")
        found = (page.parent / file).resolve() if file else page
        if not found.exists() or (anchor and anchor not in anchors_of(found)):
            broken.append(target)
    assert broken == []


def anchors_of(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", ["flags.md", "metrics.md"])
def test_a_generated_page_is_as_the_code_says(name: str) -> None:
    assert (DOCS / name).read_text(encoding="utf-8") == generate_module().PAGES[name](), "run python docs/generate.py"


def test_pages_are_in_the_navigation() -> None:
    listed = set(re.findall(r": ([\w/.-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.M))
    assert listed == {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}


def test_no_block_is_left_out() -> None:
    """Shell blocks are checked here, and every block of another language has a test that runs it."""
    found = set()
    for page in PAGES:
        languages = re.findall(r"^ *```(\w+)$", page.read_text(encoding="utf-8"), re.M)
        found |= {(name_of(page), language) for language in languages if language != "bash"}
    here = {("README.md", "python"), ("docs/sandbox.md", "python")}
    assert found == here | set(RUN_ELSEWHERE)
    for (page, _), test in RUN_ELSEWHERE.items():
        assert Path(page).name in (ROOT / "tests" / test).read_text(encoding="utf-8")


def test_the_readme_activates_the_environment_that_make_makes_before_any_command() -> None:
    """In a plain shell after `make quickstart` there is no slime-retool yet."""
    lines = "".join(blocks_of(ROOT / "README.md", "bash")).splitlines()
    places = [number for number, line in enumerate(lines) if re.match(r"slime-retool|python |bash ", line)]
    (activated,) = (number for number, line in enumerate(lines) if line.startswith("source "))
    assert lines.index(next(line for line in lines if line.startswith("make quickstart"))) < activated < min(places)
    made = subprocess.run(["make", "help", "TAG=3.11"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert f"only the environment in {lines[activated].split()[1].removesuffix('/bin/activate')}\n" in made


def test_the_task_of_the_readme_loads_and_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = (block for block in blocks_of(ROOT / "README.md", "python") if "my_task.py" in block)
    (tmp_path / "my_task.py").write_text(block, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    hooks = ["--custom-rm-path", "my_task.reward_func", "--custom-generate-function-path", "my_task.generate"]
    config = parse_config([*hooks, "--wrong", "-0.5"])
    assert isinstance(config, Config)
    import my_task

    right, wrong = (Sample(prompt="6 * 7?", label="42", response=text) for text in ("It is 42.", "It is 41."))
    assert asyncio.run(my_task.reward_func(config, right)) == 1.0
    assert asyncio.run(my_task.reward_func(config, wrong)) == -0.5
    assert asyncio.run(my_task.generate(config, right, {})) is right


@pytest.mark.parametrize("page", [ROOT / "README.md", DOCS / "sandbox.md"], ids=name_of)
def test_the_sandbox_example_prints_what_it_says(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = (block for block in blocks_of(page, "python") if "Sandbox(" in block)
    names: dict[str, object] = {}
    exec("async def main():\n" + textwrap.indent(block, "    "), names)
    asyncio.run(names["main"]())
    said = re.findall(r"^ *print\(.*\) +# (.*)$", block, re.M)
    assert capsys.readouterr().out.splitlines() == said and said
