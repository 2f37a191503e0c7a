"""SFT batches: conversations with their masks, full and counted."""

from __future__ import annotations

import asyncio

import pytest
from test_data_rendering import TOOLS, assistant, byte_tokenizer, tool, user

from slime_retool.config import parse_config
from slime_retool.data.readers import write_rows
from slime_retool.data.rendering import tokenize_conversation
from slime_retool.data.source import PromptDataSource
from slime_retool.errors import DataError
from slime_retool.rollout.context import RolloutContext
from slime_retool.rollout.sft_rollout import generate_rollout

SHORT = [user("q"), assistant("", "print(1)"), tool("1"), assistant("one")]
LONG = [user("q" * 500), assistant("x")]
REFUSED = [user("q"), assistant("<|im_end|>")]


def rollout(tmp_path, conversations, *flags):
    write_rows(tmp_path / "sft.parquet", [{"messages": messages, "tools": TOOLS} for messages in conversations])
    config = parse_config([
        "--prompt-data", str(tmp_path / "sft.parquet"), "--input-key", "messages", "--loss-type", "sft_loss",
        "--rollout-batch-size", "2", "--max-sampling-rounds", "3", *flags,
    ])  # fmt: skip
    context = RolloutContext(config, byte_tokenizer(), engine=None)
    return asyncio.run(generate_rollout(context, PromptDataSource(config, context.tokenizer), 0))


def test_a_batch_holds_ids_and_mask_of_each_conversation(tmp_path):
    batch = rollout(tmp_path, [SHORT, [user("a"), assistant("b")]])
    expected = [tokenize_conversation(byte_tokenizer(), m, TOOLS) for m in (SHORT, [user("a"), assistant("b")])]
    assert [(list(s.tokens), list(s.loss_mask)) for s in batch.samples] == expected
    assert batch.metrics["rollout/tokens"] == sum(len(ids) for ids, _ in expected)
    assert batch.metrics["rollout/supervised_tokens"] == sum(sum(mask) for _, mask in expected)
    assert batch.metrics["rollout/skipped_too_long"] == batch.metrics["rollout/skipped_refused"] == 0


def test_conversations_too_long_or_refused_are_counted_and_replaced_never_cut(tmp_path):
    limit = len(tokenize_conversation(byte_tokenizer(), SHORT, TOOLS)[0])
    batch = rollout(tmp_path, [LONG, REFUSED, SHORT], "--rollout-max-context-len", str(limit))
    assert [sample.length for sample in batch.samples] == [limit, limit]
    assert (batch.metrics["rollout/skipped_too_long"], batch.metrics["rollout/skipped_refused"]) == (2, 2)


def test_a_batch_that_no_row_can_fill_ends_with_the_reasons(tmp_path):
    with pytest.raises(DataError, match="0 of 6 conversations .* 3 have more than .* 3 were refused, the last because"):
        rollout(tmp_path, [LONG, REFUSED], "--rollout-max-context-len", "300")


def test_a_text_prompt_is_refused(tmp_path):
    write_rows(tmp_path / "t.jsonl", [{"messages": "plain"}])
    config = parse_config(
        ["--prompt-data", str(tmp_path / "t.jsonl"), "--input-key", "messages", "--rollout-batch-size", "1"]
    )
    context = RolloutContext(config, byte_tokenizer(), engine=None)
    with pytest.raises(DataError, match="SFT needs conversations"):
        asyncio.run(generate_rollout(context, PromptDataSource(config, context.tokenizer), 0))


def test_the_tool_schema_reaches_the_prompt(tmp_path):
    text = byte_tokenizer().decode(rollout(tmp_path, [SHORT]).samples[0].tokens)
    assert TOOLS[0]["function"]["name"] in text.split("<|im_end|>")[0]
