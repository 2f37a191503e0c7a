"""Mistakes of many kinds: each ends in one line and its exit code, without a traceback and before trainers start."""

from __future__ import annotations

import gzip
import json
import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from sglang_utils import make_tiny_checkpoint
from test_bad_rows import RECIPE, RECIPE_HOOKS
from test_config import HF_CONFIG
from test_data_rendering import TEMPLATE, byte_tokenizer

from megatron_bridge.checkpoint import LATEST_FILE
from slime_retool import cli

HOOKS = """
from slime_retool.types import Sample

VALUE = 3

async def reward(args, sample): return 1.0
async def generate(args, sample, params): return sample
async def of_one(args): return 1.0
def not_awaited(args, sample, params) -> Sample: return sample
async def async_filter(args, group): return True
"""
RECIPE_FLAGS = {"--" + name.replace("_", "-"): value for name, value in RECIPE_HOOKS.items()}
ROWS = {
    "rows": '{"prompt": "1+1?", "label": "2"}',
    "null_label": '{"prompt": "q", "label": "2"}\n{"prompt": "q", "label": null}',
    "other_columns": '{"question": "q", "answer": "2"}',
    "cut_line": '{"prompt": "q", "label": "2"}\n{"prompt": "q"',
    "assistant_last": '{"prompt": [{"role": "assistant", "content": "x"}], "label": "2"}',
    "system": '{"prompt": [{"role": "system", "content": "x"}, {"role": "user", "content": "x"}], "label": "2"}',
    "unknown_tool": '{"prompt": "q", "label": "2", "tools": [{"name": "browser"}]}',
    "long": '{"prompt": "' + "x" * 99 + '", "label": "2"}',
    "empty": "",
    "unreadable": '{"prompt": "q", "label": "\\\\frac{1}{"}',
}
TEMPLATES = {
    "hf": TEMPLATE,
    "no_template": None,
    "weights": TEMPLATE,
    "refuses": "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + TEMPLATE,
}
Changes = dict[str, str | None]


@dataclass(frozen=True)
class Case:
    """A command line, as changes of a run that starts or as words; `{}` stands for the folder of `world`."""

    given: Changes | str
    """Flag -> its value, "" for a switch, None for a flag that is left out."""
    words: str
    code: int = 2
    before: Callable[[pytest.MonkeyPatch], Any] = lambda patch: None


def flags_of(**changes: str | None) -> Changes:
    return {"--" + name.replace("_", "-"): value for name, value in changes.items()}


def no_gpus(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Path, "glob", lambda self, pattern: iter(()))
    patch.setattr(os.path, "exists", lambda path, of=os.path.exists: path != "/dev/dxg" and of(path))
    patch.delenv("RAY_ADDRESS", raising=False)


def full_disk(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1000))


def read_only(patch: pytest.MonkeyPatch) -> None:  # tests may run as root
    patch.setattr(os, "access", lambda path, mode: not path.endswith("/world"))


def no_wandb_key(patch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        patch.delenv(name, raising=False)
    patch.setattr("wandb.login", lambda **_: False)


FLAGS = {
    "misspelled flag": Case(flags_of(rollout_temprature="1"), "did you mean --rollout-temperature?"),
    "beginning of a flag": Case(flags_of(rollout_temp="1"), "--rollout-temp; did you mean --rollout-temperature?"),
    "value without a flag": Case("train 5", "unexpected argument '5': every option is a --flag"),
    "flag without its value": Case("train --lr", "argument --lr: expected one argument"),
    "text for a number": Case(flags_of(lr="fast"), "argument --lr: invalid float value: 'fast'"),
    "unknown choice": Case(flags_of(tool_format="xml"), "argument --tool-format: invalid choice: 'xml'"),
    "unknown estimator": Case(flags_of(advantage_estimator="grpoo"), "--advantage-estimator"),
    "value out of bounds": Case(flags_of(lr="0"), "--lr must be above 0, got 0.0"),
    "temperature zero": Case(flags_of(rollout_temperature="0"), "--rollout-temperature must be above 0"),
    "no length of the run": Case(flags_of(num_rollout=None), "give one of --num-rollout and --num-epoch"),
    "two lengths of the run": Case(flags_of(num_epoch="1"), "give one of --num-rollout and --num-epoch"),
    "no data": Case(flags_of(prompt_data=None), "--prompt-data is required"),
    "no model": Case(flags_of(hf_checkpoint=None), "--hf-checkpoint is required"),
    "flag without effect": Case(flags_of(critic_lr="1"), "--critic-lr has no effect without the critic"),
    "SFT in groups": Case(flags_of(loss_type="sft_loss"), "--n-samples-per-prompt must be 1, got 4"),
    "a group of one": Case(flags_of(n_samples_per_prompt="1"), "at least 2"),
    "unknown command": Case("evaluate", "unknown command 'evaluate'"),
    "data without check": Case("data chek x", "did you mean `slime-retool data check`?"),
    "nothing to check": Case("data check", "the following arguments are required: FILE"),
    "nothing to evaluate": Case("eval --hf-checkpoint {}/hf", "--eval-prompt-data NAME FILE is required"),
    "nothing to plan": Case("plan --rollout-batch-size 4", "no model to plan"),
}
FILES = {
    "missing data file": Case(flags_of(prompt_data="{}/nowhere.jsonl"), "--prompt-data: no such file: {}/nowhere"),
    "missing evaluation file": Case(flags_of(eval_prompt_data="a {}/nowhere.jsonl"), "no such file: {}/nowhere.jsonl"),
    "evaluation set without a name": Case(flags_of(eval_prompt_data="{}/rows.jsonl"), "takes pairs NAME FILE, got 1"),
    "two evaluation sets of a name": Case(
        flags_of(eval_prompt_data="a {}/rows.jsonl a {}/rows.jsonl"), "set names must differ, got a a"
    ),
    "folder as data": Case(flags_of(prompt_data="{}/hf"), "--prompt-data: no such file: {}/hf"),
    "data of another kind": Case(flags_of(prompt_data="{}/rows.json"), "must end in .jsonl or .parquet"),
    "gzip named jsonl": Case(flags_of(prompt_data="{}/gzip.jsonl"), "is compressed by gzip, not lines of JSON"),
    "broken parquet": Case(flags_of(prompt_data="{}/broken.parquet"), "is not a readable parquet file"),
    "empty file": Case(flags_of(prompt_data="{}/empty.jsonl"), "{}/empty.jsonl holds no rows"),
    "rows beyond the file": Case(flags_of(prompt_data="{}/rows.jsonl@[5:]"), "has 1 rows, none of them in [5:]"),
    "one name for two sets": Case(flags_of(prompt_data="{}/rows.jsonl {}/rows.jsonl"), "must have different names"),
    "weights on some sets": Case(flags_of(prompt_data="{}/rows.jsonl@2 {}/long.jsonl"), "a weight or none"),
    "output in a file": Case(flags_of(output_dir="{}/rows.jsonl/out"), "{}/rows.jsonl is not a folder"),
    "no permission": Case(flags_of(output_dir="{}/new"), "{}/new: no permission to write in {}", before=read_only),
    "check of a missing file": Case("data check {}/nowhere.jsonl", "'{}/nowhere.jsonl' does not exist"),
    "view of a missing file": Case("view {}/nowhere.jsonl", "{}/nowhere.jsonl"),
}
DATA = {
    "null label": Case(flags_of(prompt_data="{}/null_label.jsonl"), "null_label.jsonl, row 2: it has no label"),
    "other columns": Case(flags_of(prompt_data="{}/other_columns.jsonl"), "--input-key question --label-key answer"),
    "line cut off": Case(flags_of(prompt_data="{}/cut_line.jsonl"), "cut_line.jsonl, row 2: line 2: not valid JSON"),
    "unreadable label": Case(flags_of(prompt_data="{}/unreadable.jsonl"), "own answer '\\\\frac{{1}}{{' is not right"),
    "unknown tool": Case(
        flags_of(prompt_data="{}/unknown_tool.jsonl") | RECIPE_FLAGS, "row 1: the data offers tools that no code"
    ),
    "tools that nothing runs": Case(flags_of(prompt_data="{}/unknown_tool.jsonl"), "no hook runs them"),
    "all prompts too long": Case(
        flags_of(prompt_data="{}/long.jsonl", rollout_max_prompt_len="9"), "all 1 prompts have more than --rollout-max"
    ),
    "assistant turn last": Case(flags_of(prompt_data="{}/assistant_last.jsonl"), "ends with an assistant message"),
    "bad row of an evaluation set": Case(flags_of(eval_prompt_data="e {}/null_label.jsonl"), "null_label.jsonl, row 2"),
    "bad row in a dry run": Case(flags_of(prompt_data="{}/null_label.jsonl", dry_run=""), "null_label.jsonl, row 2"),
    "text for SFT": Case(flags_of(loss_type="sft_loss", n_samples_per_prompt=None), "SFT needs conversations"),
    "bad row of an API's set": Case(
        "eval --eval-prompt-data a {}/null_label.jsonl --eval-endpoint-url http://127.0.0.1:9 --eval-endpoint-model m "
        "--output-dir {}/out",
        "null_label.jsonl, row 2: it has no label",
    ),
}
TOKENIZERS = {
    "no tokenizer": Case(flags_of(hf_checkpoint="{}/no_tokenizer"), "{}/no_tokenizer' has no tokenizer that loads"),
    "no chat template": Case(flags_of(hf_checkpoint="{}/no_template"), "has no chat template"),
    "role that the template refuses": Case(
        flags_of(hf_checkpoint="{}/refuses", prompt_data="{}/system.jsonl"), "no system role"
    ),
    "more ids than weights": Case(flags_of(hf_checkpoint="{}/small"), "100"),
    "check without a tokenizer": Case("data check {}/rows.jsonl --tokenizer {}/empty", "--tokenizer '{}/empty' has no"),
}
CHECKPOINTS = {
    "missing model": Case(flags_of(hf_checkpoint="{}/nowhere"), "--hf-checkpoint: no such folder: {}/nowhere"),
    "name of the hub": Case(flags_of(hf_checkpoint="Qwen/Qwen3-4B"), "hf download Qwen/Qwen3-4B --local-dir Qwen3-4B"),
    "adapters for a model": Case(flags_of(hf_checkpoint="{}/lora"), "it holds LoRA adapters in PEFT's format"),
    "config.json that is no JSON": Case(flags_of(hf_checkpoint="{}/damaged"), "{}/damaged"),
    "unknown architecture": Case(flags_of(hf_checkpoint="{}/gpt2"), "gpt2"),
    "no reference": Case(flags_of(ref_load=None), "no weights to start from: give --ref-load DIR"),
    "Hugging Face folder as reference": Case(flags_of(ref_load="{}/hf"), "slime-retool convert to-megatron"),
    "Hugging Face folder to go on from": Case(flags_of(load="{}/hf"), "slime-retool convert to-megatron"),
    "reference's place": Case(flags_of(save="{}/ref"), "--save {}/ref is --ref-load"),
    "another run's place": Case(flags_of(save="{}/used"), "holds the checkpoints of an earlier run"),
    "damaged checkpoint": Case(flags_of(load="{}/odd"), "holds 'seven': expected 'release' or an iteration number"),
    "saving nowhere": Case(flags_of(save_interval="2"), "--save-interval has no effect without --save DIR"),
    "export into a full folder": Case(flags_of(save="{}/new", save_hf="{}/hf"), "the folder {}/hf is not empty"),
    "no room for a checkpoint": Case(flags_of(save="{}/new"), "GiB are free on that disk", before=full_disk),
    "conversion of no model": Case("convert to-megatron --hf-checkpoint {}/empty --save {}/new", "{}/empty"),
    "conversion of adapters": Case("convert to-megatron --hf-checkpoint {}/lora --save {}/new", "LoRA adapters"),
    "conversion without weights": Case("convert to-megatron --hf-checkpoint {}/hf --save {}/new", "no *.safetensors"),
    "conversion of an incomplete model": Case(
        "convert to-megatron --hf-checkpoint {}/weights --save {}/new", "has no tensor model.embed_tokens.weight"
    ),
    "conversion into a folder of one's own": Case(
        "convert to-megatron --hf-checkpoint {}/whole --save {}/thesis --force", "holds no checkpoint (but thesis.tex)"
    ),
    "conversion back of nothing": Case(
        "convert to-hf --input-dir {}/empty --output-dir {}/new --origin-hf-dir {}/empty", "{}/empty"
    ),
}
SHAPES = {
    "another rotary base": Case(flags_of(num_layers="4", rotary_base="77"), "--"),
    "context beyond the model": Case(flags_of(rollout_max_context_len="9999"), "longer than the model's 512 positions"),
    "step that does not divide": Case(flags_of(global_batch_size="5"), "must be a multiple of --global-batch-size 5"),
    "world that TP does not divide": Case(
        flags_of(actor_num_gpus_per_node="3", tensor_model_parallel_size="2"), "does not divide the 3 training proc"
    ),
    "more stages than layers": Case(
        flags_of(actor_num_gpus_per_node="8", pipeline_model_parallel_size="8"), "use at most 4"
    ),
    "adapters wider than the model": Case(flags_of(lora_rank="65"), "at most the hidden size 64, got 65"),
}
ENDPOINTS = {
    "engine without a scheme": Case(flags_of(rollout_external_urls="10.0.0.2:30000"), "must be an address like http://HOST"),
    "engine named twice": Case(flags_of(rollout_external_urls="http://h:1 http://h:1"), "names a server twice"),
    "sandbox without a scheme": Case(flags_of(sandbox_url="h:1"), "--sandbox-url must be an address like"),
    "API of another protocol": Case(flags_of(eval_endpoint_url="ftp://h"), "--eval-endpoint-url must be an address"),
    "API without a model": Case(
        "eval --eval-prompt-data a {}/rows.jsonl --eval-endpoint-url http://127.0.0.1:9",
        "--eval-endpoint-url needs --eval-endpoint-model NAME",
    ),
    "teacher without a weight": Case(flags_of(teacher_url="http://127.0.0.1:9"), "--distill-coef go together"),
    "port of the server": Case(flags_of(sglang_port="1"), "--sglang-port cannot be passed through"),
    "replicas of an engine": Case(flags_of(sglang_dp_size="2"), "--sglang-dp-size must be at most 1, got 2"),
    "stages of an engine": Case(flags_of(sglang_pp_size="2"), "--sglang-pp-size must be at most 1, got 2"),
    "port that is taken": Case("sandbox serve --isolation none --port PORT", "PORT", code=1),
    "sandbox without room": Case("sandbox serve --concurrency 0", "sandbox concurrency must be above 0, got 0"),
}
HOOK_CASES = {
    "no such module": Case(flags_of(custom_rm_path="no_such.reward"), "cannot import 'no_such'"),
    "no such function": Case(flags_of(custom_rm_path="mistaken_hooks.rewrad"), "has no function 'rewrad'"),
    "path of a file": Case(flags_of(custom_rm_path="./mistaken_hooks.py"), "--custom-rm-path must be a dotted path"),
    "hook that is a number": Case(flags_of(custom_rm_path="mistaken_hooks.VALUE"), "is a int and not a function"),
    "hook with other arguments": Case(
        flags_of(custom_rm_path="mistaken_hooks.of_one"), "cannot be called with these 2 arguments"
    ),
    "hook that cannot be awaited": Case(
        flags_of(custom_generate_function_path="mistaken_hooks.not_awaited"), "returns what cannot be awaited"
    ),
    "filter that always says yes": Case(
        flags_of(dynamic_sampling_filter_path="mistaken_hooks.async_filter"), "its answer would always count as true"
    ),
    "hook with a slip": Case(
        flags_of(custom_rm_path="broken_hooks.reward"), "broken_hooks.py, line 2 (NameError: name 'undefined' is not"
    ),
    "hook that does not parse": Case(
        flags_of(custom_rm_path="unparsed_hooks.reward"), "unparsed_hooks.py, line 1 (SyntaxError: "
    ),
    "hook's flag without the hook": Case(flags_of(format_penalty="1"), "a hook's own flags need the hook's path"),
}
TRACKERS = {
    "W&B without a key": Case(flags_of(use_wandb=""), "--use-wandb finds no key: run `wandb log", before=no_wandb_key),
    "no such tracker": Case(flags_of(custom_tracker_path="no_such.Tracker"), "cannot import 'no_such'"),
}
DEVICES = {
    "GPU that there is not": Case(flags_of(device="cuda"), "needs 2 GPUs and finds none; use --de", before=no_gpus),
    "GPU for an evaluation": Case(
        "eval --device cuda --hf-checkpoint {}/hf --eval-prompt-data a {}/rows.jsonl --output-dir {}/out",
        "needs 1 GPUs and finds none",
        before=no_gpus,
    ),
    "bf16 on the CPU": Case(flags_of(precision="bf16"), "--precision bf16 needs GPUs"),
    "fused layers on the CPU": Case(flags_of(transformer_impl="transformer_engine"), "GPUs; on the CPU use local"),
    "engines that do not divide": Case(
        flags_of(rollout_num_gpus="3", rollout_num_gpus_per_engine="2"), "does not divide the 3 GPUs"
    ),
    "more engines than GPUs": Case(flags_of(colocate="", rollout_num_gpus="2"), "more than the 1 training GPUs"),
}
GROUPS = (FLAGS, FILES, DATA, TOKENIZERS, CHECKPOINTS, SHAPES, ENDPOINTS, HOOK_CASES, TRACKERS, DEVICES)
CASES = {name: case for group in GROUPS for name, case in group.items()}


def test_there_are_more_than_sixty_of_them():
    assert len(CASES) == sum(map(len, GROUPS)) > 100


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a start reads, whole and damaged."""
    root = tmp_path_factory.mktemp("x") / "world"
    config = HF_CONFIG | {"vocab_size": 300}
    others = ("ref", "used", "odd", "empty", "lora", "damaged", "gpt2", "no_tokenizer", "small", "thesis")
    for folder in (*others, *TEMPLATES):
        (root / folder).mkdir(parents=True)
    for folder, template in TEMPLATES.items():
        tokenizer = byte_tokenizer(template or TEMPLATE)
        tokenizer.save_pretrained(root / folder)
        (root / folder / "config.json").write_text(json.dumps(config))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (root / "small" / file).write_bytes((root / "hf" / file).read_bytes())
    template_file = root / "no_template" / "chat_template.jinja"
    template_file.unlink(missing_ok=True)
    settings = json.loads((root / "no_template" / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (root / "no_template" / "tokenizer_config.json").write_text(json.dumps(settings))
    (root / "no_tokenizer" / "config.json").write_text(json.dumps(config))
    (root / "small" / "config.json").write_text(json.dumps(HF_CONFIG))
    (root / "weights" / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")  # without a tensor
    (root / "damaged" / "config.json").write_text("{")
    (root / "gpt2" / "config.json").write_text('{"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}')
    (root / "lora" / "adapter_config.json").write_text("{}")
    (root / "thesis" / "thesis.tex").touch()
    make_tiny_checkpoint(root / "whole")
    for folder, text in {"ref": "release", "used": "3", "odd": "seven"}.items():
        (root / folder / LATEST_FILE).write_text(text)
    for name, text in ROWS.items():
        (root / f"{name}.jsonl").write_text(text + "\n" * bool(text))
    (root / "rows.json").write_text("[]")
    (root / "gzip.jsonl").write_bytes(gzip.compress(b"{}"))
    (root / "broken.parquet").write_bytes(b"PAR1")
    (root / "mistaken_hooks.py").write_text(HOOKS)
    (root / "broken_hooks.py").write_text("\nundefined\n")
    (root / "unparsed_hooks.py").write_text("def reward(:\n")
    return root


@pytest.fixture
def without_ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ray does not start beside the data. To import it, or what comes after, is an error that no command catches."""
    for name in [*sys.modules, "ray", "slime_retool.cluster.cluster"]:
        if name == "ray" or name.startswith(("ray.", "slime_retool.cluster.")):
            monkeypatch.setitem(sys.modules, name, None)
    connection = ModuleType("slime_retool.cluster.connection")
    monkeypatch.setattr(connection, "RayStart", lambda config: nullcontext(), raising=False)
    monkeypatch.setitem(sys.modules, connection.__name__, connection)
    yield
    assert sys.modules["ray"] is None


def command_line(case: Case, world: Path, port: int) -> list[str]:
    if isinstance(case.given, str):
        return [word.replace("{}", str(world)).replace("PORT", str(port)) for word in case.given.split()]
    good = flags_of(
        device="cpu", hf_checkpoint="{}/hf", ref_load="{}/ref", prompt_data="{}/rows.jsonl", num_rollout="2",
        rollout_batch_size="4", n_samples_per_prompt="4", output_dir="{}/out",
    )  # fmt: skip
    flags = {flag: value for flag, value in (good | case.given).items() if value is not None}
    words = [word for flag, value in flags.items() for word in (flag, *value.split())]
    return ["train", *(word.replace("{}", str(world)) for word in words)]


@pytest.mark.parametrize("name", CASES)
def test_a_mistake_ends_in_one_line(name: str, world: Path, without_ray, monkeypatch, capsys, caplog):
    case = CASES[name]
    for folder in (world, RECIPE):
        monkeypatch.syspath_prepend(str(folder))
    before = sorted(world.rglob("*"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        case.before(monkeypatch)
        try:
            code = cli.main(command_line(case, world, port))
        except SystemExit as done:  # argparse
            code = done.code
    out, error = capsys.readouterr()
    words = case.words.replace("{}", str(world)).replace("{{", "{").replace("}}", "}").replace("PORT", str(port))
    assert code == case.code and words in error, error
    (line,) = [line for line in error.splitlines() if "error: " in line]
    assert words in line and "Traceback" not in error + caplog.text
    written = [path.name for path in sorted(world.rglob("*")) if path not in before and "__pycache__" not in str(path)]
    assert written in ([], ["out"])


def test_the_run_that_the_mistakes_are_made_in_would_start(world: Path, without_ray, capsys):
    assert cli.main(command_line(Case(flags_of(dry_run=""), ""), world, 0)) == 0, capsys.readouterr().err
    with pytest.raises(ImportError, match="cluster"):
        cli.main(command_line(Case({}, ""), world, 0))


def test_a_dry_run_of_an_evaluation_starts_nothing_and_prints_its_flags(world: Path, without_ray, capsys):
    words = "eval --dry-run --device cpu --hf-checkpoint {}/hf --eval-prompt-data a {}/rows.jsonl --output-dir {}/out"
    assert cli.main(command_line(Case(words, ""), world, 0)) == 0
    assert capsys.readouterr().out.startswith("slime-retool eval ") and not (world / "out" / "eval").exists()
    with pytest.raises(ImportError):
        cli.main(command_line(Case(words.replace(" --dry-run", ""), ""), world, 0))
