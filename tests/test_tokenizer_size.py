"""A tokenizer with more ids than its model has weights for is refused wherever the two meet."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from sglang_utils import make_tiny_checkpoint

from megatron_bridge.flags import to_flags
from megatron_bridge.hf_config import check_tokenizer, model_args_from_hf, read_hf_config
from slime_retool import cli
from slime_retool.chat import load_tokenizer
from slime_retool.config import parse_config, resolve, validate
from slime_retool.data.readers import write_rows
from slime_retool.errors import ConfigError


@pytest.fixture
def grown(tmp_path: Path) -> Path:
    """A checkpoint whose tokenizer got three tokens more than config.json's 259."""
    folder = tmp_path / "hf"
    make_tiny_checkpoint(folder)
    tokenizer = load_tokenizer(folder)
    check_tokenizer(folder)
    tokenizer.add_tokens(["<one>", "<two>", "<three>"])
    tokenizer.save_pretrained(folder)
    return folder


SIZES = r"has 262 ids, added tokens included, and the model's vocabulary \(vocab_size in config.json\) 259"


def test_a_start_is_refused_with_both_sizes(grown, tmp_path):
    write_rows(tmp_path / "rows.jsonl", [{"prompt": "a", "label": "1"}])
    flags = ["--hf-checkpoint", str(grown), "--prompt-data", str(tmp_path / "rows.jsonl"), "--device", "cpu"]
    with pytest.raises(ConfigError, match=SIZES):
        validate(resolve(parse_config(flags)))
    with pytest.raises(ConfigError, match=f"^--hf-checkpoint: .*{SIZES}"):
        load_tokenizer(grown)


@pytest.mark.parametrize("flag", ["--tokenizer", "--hf-checkpoint"])
def test_a_check_of_data_is_refused_with_both_sizes(grown, tmp_path, capsys, flag):
    write_rows(tmp_path / "rows.jsonl", [{"prompt": "a", "label": "1"}])
    assert cli.main(["data", "check", str(tmp_path / "rows.jsonl"), flag, str(grown)]) == 2
    error = capsys.readouterr().err
    assert "has 262 ids" in error and "config.json) 259" in error and error.count("\n") == 1


def test_a_conversion_is_refused_with_both_sizes(grown, tmp_path, capsys):
    model = to_flags(model_args_from_hf(read_hf_config(grown)))
    flags = ["--hf-checkpoint", str(grown), "--save", str(tmp_path / "td")]
    assert cli.main(["convert", "to-megatron", *model, *flags]) == 2
    error = capsys.readouterr().err
    assert "has 262 ids" in error and "config.json) 259" in error and not (tmp_path / "td").exists()


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer.json", {"model": {"vocab": {"a": 0, "b": 5}}}),
        ("tokenizer.json", {"model": {"vocab": [["a", 0.0]] * 6}}),
        ("tokenizer.json", {"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 5, "content": "<x>"}]}),
        ("vocab.json", {"a": 0, "b": 5}),
        ("added_tokens.json", {"<x>": 5}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"5": {"content": "<x>"}}}),
    ],
)
def test_ids_are_found_in_every_file_that_names_some(tmp_path, file, content):
    (tmp_path / file).write_text(json.dumps(content))
    check_tokenizer(tmp_path)  # nothing to compare with
    (tmp_path / "config.json").write_text('{"vocab_size": 6}')
    check_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text('{"vocab_size": 5}')
    with pytest.raises(ValueError, match="has 6 ids.* 5: ids from 5 on"):
        check_tokenizer(tmp_path)
