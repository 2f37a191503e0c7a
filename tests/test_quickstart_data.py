"""The quickstart's problems, traces, chat template and base model keep what their docstrings promise."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from itertools import islice
from pathlib import Path
from types import ModuleType

import pandas as pd
import pytest

from slime_retool.errors import ConfigError

QUICKSTART = Path(__file__).parents[1] / "examples" / "quickstart"


def _import(name: str) -> ModuleType:
    # The quickstart's scripts import each other as siblings, as they do when run from the command line.
    if str(QUICKSTART) not in sys.path:
        sys.path.insert(0, str(QUICKSTART))
    return importlib.import_module(name)


compare = _import("compare")
problems = _import("problems")
traces = _import("traces")

CALL = {"type": "function", "function": {"name": "code_interpreter", "arguments": {"code": "print(1)"}}}
CONVERSATION = [
    {"role": "user", "content": "What is 1?"},
    {"role": "assistant", "content": "Think first.", "tool_calls": [CALL, CALL]},
    {"role": "tool", "content": "1"},
    {"role": "tool", "content": "one"},
    {"role": "assistant", "content": "Answer: \\boxed{1}"},
]
RENDERED = """<|im_start|>system
# Tools

<tools>
{"type": "function", "function": {"name": "code_interpreter", "description": "Run Python code.", \
"parameters": {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]}}}
</tools>

Call a tool by JSON in <tool_call></tool_call>.<|im_end|>
<|im_start|>user
What is 1?<|im_end|>
<|im_start|>assistant
Think first.
<tool_call>
{"name": "code_interpreter", "arguments": {"code": "print(1)"}}
</tool_call>
<tool_call>
{"name": "code_interpreter", "arguments": {"code": "print(1)"}}
</tool_call><|im_end|>
<|im_start|>user
<tool_response>
1
</tool_response>
<tool_response>
one
</tool_response><|im_end|>
<|im_start|>assistant
Answer: \\boxed{1}<|im_end|>
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("base")
    _import("base_model").write_base_model(path, seed=3)
    return path


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(checkpoint)


def test_executed_code_prints_the_stated_answer_for_every_kind():
    drawn = list(islice(problems.generate_problems("rl", seed=1), 10 * len(problems.KINDS)))
    assert {problem.kind for problem in drawn} == set(problems.KINDS)
    assert traces.execute([problem.code for problem in drawn]) == [str(problem.answer) for problem in drawn]


def test_splits_are_disjoint_and_each_has_its_share():
    questions = {
        split: {problem.question for problem in islice(problems.generate_problems(split, seed=0), 800)}
        for split in problems.SPLITS
    }
    assert all(len(found) == 800 for found in questions.values())
    assert not questions["eval"] & questions["sft"]
    assert not questions["eval"] & questions["rl"]
    assert not questions["sft"] & questions["rl"]
    splits = [problems.split_of(f"question {i}") for i in range(4000)]
    assert splits.count("eval") / 4000 == pytest.approx(1 / 8, abs=0.03)
    assert splits.count("sft") / 4000 == pytest.approx(3 / 8, abs=0.03)


def test_the_same_seed_gives_the_same_problems_and_another_seed_gives_others():
    def draw(seed: int) -> list:
        return list(islice(problems.generate_problems("sft", seed), 40))

    assert draw(5) == draw(5)
    assert draw(5) != draw(6)


@pytest.mark.parametrize(("split", "kinds"), [("test", ("sum",)), ("rl", ("cube",))])
def test_an_unknown_split_or_kind_is_refused_with_the_known_ones(split: str, kinds: tuple[str, ...]):
    with pytest.raises(ValueError, match="use a listed"):
        next(problems.generate_problems(split, seed=0, kinds=kinds))


def test_a_kind_that_runs_out_of_questions_says_so():
    with pytest.raises(ValueError, match="no fresh eval question"):
        list(islice(problems.generate_problems("eval", seed=0, kinds=("difference",)), 10_000))


def test_execute_reports_a_failing_snippet():
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        traces.execute(["print(1)", "print(1//0)"])


def test_tool_kinds_always_call_the_tool_and_thin_kinds_about_a_third_of_the_time():
    calls: dict[bool, list[bool]] = {True: [], False: []}
    codes = {kind: spec.code.split("{0}")[0] for kind, spec in problems.KINDS.items()}
    drawn = list(islice(problems.generate_problems("sft", 0, traces.SFT_KINDS), 1200))
    for problem, row in zip(drawn, traces.build_sft_rows(1200, seed=0), strict=True):
        assert row["messages"][0]["content"] == problem.question
        assert row["messages"][-1]["content"] == f"Answer: \\boxed{{{problem.answer}}}"
        called = len(row["messages"]) == 4
        if called:
            assert row["messages"][2] == {"role": "tool", "content": str(problem.answer)}
            code = row["messages"][1]["tool_calls"][0]["function"]["arguments"]["code"]
            assert code.startswith(codes[problem.kind])
        calls[problem.kind in traces.TOOL_KINDS].append(called)
    assert all(calls[True])
    assert sum(calls[False]) / len(calls[False]) == pytest.approx(traces.THIN_TOOL_SHARE, abs=0.08)


def test_written_files_read_back_with_tools_and_labels(tmp_path: Path):
    command = [sys.executable, str(QUICKSTART / "traces.py"), "--output-dir", str(tmp_path)]
    sizes = ["--sft-rows", "60", "--rl-rows", "16", "--eval-rows", "8"]
    subprocess.run([*command, *sizes], check=True, capture_output=True)
    sft = pd.read_parquet(tmp_path / "sft.parquet")
    assert len(sft) == 60
    assert json.loads(sft.tools[0]) == traces.TOOLS
    rl = [json.loads(line) for line in (tmp_path / "rl.jsonl").read_text().splitlines()]
    held_out = [json.loads(line) for line in (tmp_path / "eval.jsonl").read_text().splitlines()]
    assert len(rl) == 16 and len(held_out) == 8
    for row in rl + held_out:
        assert set(row) == {"prompt", "label", "tools", "metadata"}
        assert str(int(row["label"])) == row["label"]
    assert {row["metadata"]["kind"] for row in held_out} == set(problems.KINDS)


def test_the_template_renders_qwen_tool_turns(tokenizer):
    assert tokenizer.apply_chat_template(CONVERSATION, tools=traces.TOOLS, tokenize=False) == RENDERED


def test_the_template_puts_a_given_system_message_before_the_tools(tokenizer):
    messages = [{"role": "system", "content": "Be brief."}, CONVERSATION[0]]
    with_tools = tokenizer.apply_chat_template(messages, tools=traces.TOOLS, tokenize=False)
    assert with_tools.startswith("<|im_start|>system\nBe brief.\n\n# Tools\n")
    without = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert without == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is 1?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_each_generation_prompt_is_a_token_prefix_of_the_whole_conversation(tokenizer):
    whole = tokenizer(RENDERED)["input_ids"]
    for turn in (1, 4):
        prompt = tokenizer.apply_chat_template(
            CONVERSATION[:turn], tools=traces.TOOLS, add_generation_prompt=True, return_dict=False
        )
        assert whole[: len(prompt)] == prompt


def test_digits_and_tags_are_single_tokens_and_any_text_survives(tokenizer):
    assert tokenizer.tokenize("407") == ["4", "0", "7"]
    base_model = _import("base_model")
    for tag in base_model.TURN_TOKENS + base_model.TOOL_TOKENS:
        assert len(tokenizer.tokenize(tag)) == 1
    text = "Größe 12 → {'x': 3}\n\n\ttabs"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_skipping_special_tokens_keeps_tool_tags_as_qwen_does(tokenizer):
    ids = tokenizer("<tool_call>\n{}\n</tool_call><|im_end|>")["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<tool_call>\n{}\n</tool_call>"
    assert tokenizer.eos_token == "<|im_end|>" and tokenizer.pad_token == "<|endoftext|>"


def test_prompts_and_calls_are_short_in_tokens(tokenizer):
    for row in traces.build_prompt_rows("rl", 64, seed=0):
        prompt = tokenizer.apply_chat_template(
            row["prompt"], tools=row["tools"], add_generation_prompt=True, return_dict=False
        )
        assert len(prompt) <= 40
    for problem in islice(problems.generate_problems("rl", seed=0), 64):
        messages = traces.tool_trace(problem, str(problem.answer))
        text = tokenizer.apply_chat_template(messages[1:2], tokenize=False)
        assert len(tokenizer.tokenize(text)) <= 22


def test_the_base_model_loads_as_qwen3_and_divides_by_two(checkpoint: Path, tokenizer):
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    config = model.config
    assert json.loads((checkpoint / "config.json").read_text())["architectures"] == ["Qwen3ForCausalLM"]
    assert config.tie_word_embeddings and model.dtype == torch.float32
    assert config.num_attention_heads % 2 == 0 and config.num_key_value_heads % 2 == 0
    assert config.num_hidden_layers % 2 == 0 and config.vocab_size % 2 == 0
    assert len(tokenizer) == config.vocab_size
    assert config.eos_token_id == tokenizer.eos_token_id
    with torch.no_grad():
        logits = model(torch.tensor([tokenizer("What is 11 plus 12?")["input_ids"]])).logits
    assert logits.shape[-1] == config.vocab_size and torch.isfinite(logits).all()


def test_the_same_seed_writes_the_same_weights_and_tokenizer(checkpoint: Path, tmp_path: Path):
    base_model = _import("base_model")
    base_model.write_base_model(tmp_path / "again", seed=3)
    base_model.write_base_model(tmp_path / "other", seed=4)
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (checkpoint / name).read_bytes()
    other = (tmp_path / "other" / "model.safetensors").read_bytes()
    assert other != (checkpoint / "model.safetensors").read_bytes()


def test_stages_of_another_comparison_are_refused_and_of_the_same_one_kept(tmp_path, monkeypatch):
    done: list[str] = []
    monkeypatch.setattr(compare.Comparison, "_stage", lambda self, name, command: _make_folders(self.out, name, done))
    monkeypatch.setattr(compare.Comparison, "_write_inputs", lambda self, rows: _make_folders(self.out, "data", done))
    monkeypatch.setattr(compare.Comparison, "_train", lambda self, *words: [])
    monkeypatch.setattr(compare.Comparison, "_figures", lambda self, name: {})
    monkeypatch.setattr(compare, "convert_command", lambda out: [])
    compare.Comparison(tmp_path, 1, compare.SHORT).compare(["grpo"])
    compare.Comparison(tmp_path, 1, compare.SHORT).compare(["grpo", "ppo"])
    assert done == ["data", "convert", "sft", "grpo", "ppo"]
    for seed, size in ((2, compare.SHORT), (1, compare.FULL)):
        with pytest.raises(ConfigError, match=f"{tmp_path} holds stages of another comparison"):
            compare.Comparison(tmp_path, seed, size).compare(["grpo"])


def test_the_quickstart_deletes_nothing_but_what_an_earlier_one_wrote(tmp_path):
    mine = tmp_path / "mine" / "data" / "rows.jsonl"
    mine.parent.mkdir(parents=True)
    mine.write_text("{}")
    with pytest.raises(ConfigError, match=f"{tmp_path}/mine holds files of something else"):
        compare.Quickstart(tmp_path / "mine", 1, compare.SHORT)._clean()
    assert mine.exists()
    for _ in range(2):
        compare.Quickstart(tmp_path / "new", 1, compare.SHORT)._clean()
        assert not (tmp_path / "new" / "data").exists()
        (tmp_path / "new" / "data").mkdir()


def _make_folders(out: Path, stage: str, done: list[str]) -> None:
    folder = {"convert": "base_torch_dist", "sft": "sft", "data": "data"}.get(stage, f"rl_{stage}")
    (out / folder).mkdir(parents=True)
    done.append(stage)
