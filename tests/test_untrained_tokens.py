"""Tokens of the chat template and the tool format that a checkpoint was never trained on: said, and given rows."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tool_helpers import TEMPLATE, tokenizer
from transformers import PreTrainedTokenizerFast

from slime_retool.cli import main as slime_retool
from slime_retool.config import Config
from slime_retool.rollout.manager import RolloutManager
from slime_retool.tool_use.control_tokens import control_tokens, made_of, untrained_control_tokens

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
CALL, END_CALL = "<tool_call>", "</tool_call>"
UNUSED = 8


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """bf16, untied, in two files. Nothing is untrained yet; behind the tokenizer's ids are rows that all are one."""
    folder = tmp_path / "hf"
    tokenizer(TEMPLATE).save_pretrained(folder)
    own = PreTrainedTokenizerFast.from_pretrained(folder)
    own.add_tokens([CALL, END_CALL, "<|fim|>"])
    own.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(2, len(own) + UNUSED, 16, generator=generator)
    rows[:, len(own) :] = 0.25
    other = torch.randn(3, generator=generator).bfloat16()
    save_file({EMBEDDING: rows[0].bfloat16()}, folder / "one.safetensors")
    save_file({HEAD: rows[1].bfloat16(), "model.norm.weight": other}, folder / "two.safetensors")
    return folder


def spoil(folder: Path, tokens: list[str], value: float | str) -> PreTrainedTokenizerFast:
    """Give `tokens` this value, or the row of a token, in both matrices."""
    own = PreTrainedTokenizerFast.from_pretrained(folder)
    for file, name in (("one", EMBEDDING), ("two", HEAD)):
        tensors = load_file(folder / f"{file}.safetensors")
        matrix = tensors[name]
        for token in own.convert_tokens_to_ids(tokens):
            matrix[token] = value if isinstance(value, float) else matrix[own.convert_tokens_to_ids(value)]
        save_file(tensors, folder / f"{file}.safetensors")
    return own


def test_control_tokens_are_those_of_the_template_and_of_the_format(checkpoint):
    own = PreTrainedTokenizerFast.from_pretrained(checkpoint)
    assert set(control_tokens(own, "qwen")) == {"<|im_start|>", "<|im_end|>", CALL, END_CALL}
    assert set(control_tokens(own, "retool")) == {"<|im_start|>", "<|im_end|>"}
    own.add_tokens(["<interpreter>"])
    assert "<interpreter>" in control_tokens(own, "retool")


@pytest.mark.parametrize(
    ("tokens", "value"),
    [
        ([CALL, END_CALL], 0.5),  # each other's
        ([CALL], 0.25),  # that of rows without a token
        ([END_CALL], "<|fim|>"),  # that of a token that nothing writes
        (["<|im_start|>", "<|im_end|>"], 0.0),
        (["<|im_end|>"], 0.0),
    ],
)
def test_a_row_that_is_zero_or_anothers_is_untrained(tokens, value, checkpoint):
    own = PreTrainedTokenizerFast.from_pretrained(checkpoint)
    assert untrained_control_tokens(str(checkpoint), own, "qwen") == []
    spoil(checkpoint, tokens, value)
    assert sorted(untrained_control_tokens(str(checkpoint), own, "qwen")) == sorted(tokens)


def test_a_folder_without_weights_says_nothing_of_tokens(checkpoint):
    own = spoil(checkpoint, [CALL, END_CALL], 0.5)
    (checkpoint / "one.safetensors").write_bytes(b"no weights")
    assert untrained_control_tokens(str(checkpoint), own, "qwen") == []
    for path in checkpoint.glob("*.safetensors"):
        path.unlink()
    assert untrained_control_tokens(str(checkpoint), own, "qwen") == []


@pytest.mark.parametrize("loss", ["policy_loss", "sft_loss"])
def test_a_run_warns_once_of_untrained_tokens_and_names_the_cure(loss, checkpoint, tmp_path, caplog):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1?", "label": "2"}\n')
    config = {
        "hf_checkpoint": str(checkpoint), "prompt_data": str(tmp_path / "rows.jsonl"), "output_dir": str(tmp_path),
        "rollout_batch_size": 1, "num_rollout": 1, "loss_type": loss, "debug_train_only": loss == "sft_loss",
    }  # fmt: skip
    with caplog.at_level(logging.WARNING), RolloutManager(Config(**config)):
        assert not caplog.records
    spoil(checkpoint, [CALL, END_CALL], 0.5)
    with caplog.at_level(logging.WARNING), RolloutManager(Config(**config)):
        [record] = caplog.records
    said = record.getMessage()
    assert f"was never trained on {CALL} {END_CALL}," in said and "--tool-format retool" in said
    assert f"convert init-tokens {checkpoint} --output-dir OUT" in said
    caplog.clear()
    with caplog.at_level(logging.WARNING), RolloutManager(Config(**config, tool_format="retool")):
        assert not caplog.records


def test_init_tokens_gives_untrained_tokens_the_mean_of_what_their_text_is_made_of(checkpoint, tmp_path, capsys):
    own = spoil(checkpoint, [CALL, END_CALL], 0.5)
    assert slime_retool(["convert", "init-tokens", str(checkpoint), "--output-dir", str(tmp_path / "out")]) == 0
    assert f"new rows for {CALL} {END_CALL}" in capsys.readouterr().out
    call, end = own.convert_tokens_to_ids([CALL, END_CALL])
    for file in ("one", "two"):
        before, after = (load_file(folder / f"{file}.safetensors") for folder in (checkpoint, tmp_path / "out"))
        assert before.keys() == after.keys()
        for name, value in before.items():
            if name in (EMBEDDING, HEAD):
                for number, text in ((call, "<tool_call>"), (end, "</tool_call>")):
                    # this tokenizer's tokens are bytes
                    made_of = [own.convert_tokens_to_ids(character) for character in text]
                    assert torch.equal(after[name][number], value[made_of].double().mean(0).bfloat16())
                after[name][[call, end]] = value[[call, end]]
            assert torch.equal(after[name], value)
    assert untrained_control_tokens(str(tmp_path / "out"), own, "qwen") == []
    assert PreTrainedTokenizerFast.from_pretrained(tmp_path / "out").get_vocab() == own.get_vocab()


def test_init_tokens_finds_the_tags_of_every_tool_format(checkpoint, tmp_path, capsys):
    tags = ["<code>", "</code>"]
    own = PreTrainedTokenizerFast.from_pretrained(checkpoint)
    own.add_tokens(tags)  # into the unused rows, which all are one
    own.save_pretrained(checkpoint)
    assert slime_retool(["convert", "init-tokens", str(checkpoint), "--output-dir", str(tmp_path / "out")]) == 0
    assert "new rows for <code> </code>" in capsys.readouterr().out
    assert untrained_control_tokens(str(tmp_path / "out"), own, "retool") == []


def test_tokens_of_the_same_letters_get_different_rows(checkpoint, tmp_path):
    own = PreTrainedTokenizerFast.from_pretrained(checkpoint)
    own.add_tokens(["<on>", "<no>"])  # into the unused rows
    own.save_pretrained(checkpoint)
    given = ["--output-dir", str(tmp_path / "out"), "--tokens", "<on>", "<no>"]
    assert slime_retool(["convert", "init-tokens", str(checkpoint), *given]) == 0
    for file, name in (("one", EMBEDDING), ("two", HEAD)):
        matrix = load_file(tmp_path / "out" / f"{file}.safetensors")[name]
        one, two = matrix[own.convert_tokens_to_ids(["<on>", "<no>"])]
        assert not torch.equal(one, two) and torch.allclose(one.float(), two.float(), rtol=0.05)


def test_a_token_that_is_a_word_is_made_of_its_letters(checkpoint):
    own = PreTrainedTokenizerFast.from_pretrained(checkpoint)
    own.add_tokens(["call"])
    assert made_of(own, "call") == own.convert_tokens_to_ids(list("call"))


def test_a_tied_checkpoint_has_no_output_layer_to_write(checkpoint, tmp_path):
    spoil(checkpoint, [CALL, END_CALL], 0.5)
    (checkpoint / "two.safetensors").unlink()
    assert slime_retool(["convert", "init-tokens", str(checkpoint), "--output-dir", str(tmp_path / "out")]) == 0
    assert [path.name for path in (tmp_path / "out").glob("*.safetensors")] == ["one.safetensors"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ([], "every token of the chat template was trained"),
        (["--tokens", "<nothing>"], "has no such token"),
    ],
)
def test_init_tokens_refuses_in_one_line_what_it_cannot_do(more, message, checkpoint, tmp_path, capsys):
    assert slime_retool(["convert", "init-tokens", str(checkpoint), "--output-dir", str(tmp_path / "out"), *more]) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_token_beyond_the_models_rows_is_refused(checkpoint, tmp_path, capsys):
    own = PreTrainedTokenizerFast.from_pretrained(checkpoint)
    own.add_tokens([f"<t{number}>" for number in range(UNUSED + 1)])
    own.save_pretrained(checkpoint)
    given = ["--output-dir", str(tmp_path / "out"), "--tokens", f"<t{UNUSED}>"]
    assert slime_retool(["convert", "init-tokens", str(checkpoint), *given]) == 2
    number = own.convert_tokens_to_ids(f"<t{UNUSED}>")
    assert f"none for the tokenizer's token {number}: resize it first" in capsys.readouterr().err
