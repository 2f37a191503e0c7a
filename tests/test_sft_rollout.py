"""SFT batches: conversations with their masks, full and counted."""

from __future__ import annotations

import asyncio
import json

import pytest
from test_data_rendering import TOOLS, assistant, byte_tokenizer, tool, user

from slime_retool.chat import ChatTemplate
from slime_retool.config import parse_config
from slime_retool.data.loss_mask import tokenize_conversation
from slime_retool.data.readers import write_rows
from slime_retool.data.source import PromptDataSource, load_eval_samples
from slime_retool.errors import DataError
from slime_retool.rollout.context import RolloutContext
from slime_retool.rollout.held_out import held_out_metrics, held_out_samples
from slime_retool.rollout.sft_rollout import generate_rollout
from slime_retool.types import TrainSample

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
    template = ChatTemplate(byte_tokenizer())
    expected = [tokenize_conversation(template, m, TOOLS) for m in (SHORT, [user("a"), assistant("b")])]
    assert [(list(s.tokens), list(s.loss_mask)) for s in batch.samples] == expected
    assert batch.metrics["rollout/tokens"] == sum(len(ids) for ids, _ in expected)
    assert batch.metrics["rollout/supervised_tokens"] == sum(sum(mask) for _, mask in expected)
    assert batch.metrics["rollout/skipped_too_long"] == batch.metrics["rollout/skipped_refused"] == 0


def test_conversations_too_long_or_refused_are_counted_and_replaced_never_cut(tmp_path):
    limit = len(tokenize_conversation(ChatTemplate(byte_tokenizer()), SHORT, TOOLS)[0])
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


def test_packs_and_order_of_batches_are_the_same_after_a_resume(tmp_path):
    conversations = [[user(f"q{i}"), assistant("a" * (i % 4 + 1))] for i in range(7)]
    write_rows(tmp_path / "sft.jsonl", [{"messages": messages} for messages in [*conversations, LONG, REFUSED]])
    config = parse_config([
        "--prompt-data", str(tmp_path / "sft.jsonl"), "--input-key", "messages", "--loss-type", "sft_loss",
        "--rollout-batch-size", "3", "--rollout-max-context-len", "200", "--rollout-shuffle",
    ])  # fmt: skip
    context = RolloutContext(config, byte_tokenizer(), engine=None)

    def batches(data, count):
        return [[s.tokens for s in asyncio.run(generate_rollout(context, data, i)).samples] for i in range(count)]

    whole, stopped, resumed = (PromptDataSource(config, context.tokenizer) for _ in range(3))
    expected = batches(whole, 8)
    assert batches(stopped, 3) == expected[:3]
    resumed.load_state_dict(json.loads(json.dumps(stopped.state_dict())))
    assert batches(resumed, 5) == expected[3:]


def test_batches_of_several_data_sets_say_how_many_are_of_each(tmp_path):
    for name in ("a", "b"):
        write_rows(tmp_path / f"{name}.jsonl", [{"messages": [user(name), assistant("x")]}])
    config = parse_config([
        "--prompt-data", f"one={tmp_path}/a.jsonl@3", f"two={tmp_path}/b.jsonl@1", "--input-key", "messages",
        "--loss-type", "sft_loss", "--rollout-batch-size", "4",
    ])  # fmt: skip
    context = RolloutContext(config, byte_tokenizer(), engine=None)
    batch = asyncio.run(generate_rollout(context, PromptDataSource(config, context.tokenizer), 0))
    assert (batch.metrics["rollout/one/samples"], batch.metrics["rollout/two/samples"]) == (3, 1)


# Validation


def held_out(tmp_path, conversations, *flags):
    write_rows(tmp_path / "held.jsonl", [{"messages": messages, "tools": TOOLS} for messages in conversations])
    config = parse_config([
        "--eval-prompt-data", "held", str(tmp_path / "held.jsonl"), "--input-key", "messages",
        "--loss-type", "sft_loss", *flags,
    ])  # fmt: skip
    return held_out_samples(RolloutContext(config, byte_tokenizer(), engine=None), load_eval_samples(config))


def test_held_out_conversations_are_tokenized_like_training_ones_in_file_order(tmp_path):
    conversations = [SHORT, [user("a"), assistant("b")], LONG]
    samples = held_out(tmp_path, conversations, "--rollout-max-context-len", "400")["held"]
    template = ChatTemplate(byte_tokenizer())
    expected = [tokenize_conversation(template, messages, TOOLS) for messages in conversations[:2]]
    assert [(list(sample.tokens), list(sample.loss_mask)) for sample in samples] == expected
    with pytest.raises(DataError, match="'held', conversation 2: .*<.im_end"):
        held_out(tmp_path, [SHORT, REFUSED])
    with pytest.raises(DataError, match="none of its 1 conversations has at most --rollout-max-context-len 9"):
        held_out(tmp_path, [LONG], "--rollout-max-context-len", "9")


@pytest.mark.parametrize("ranks", ["1", "2", "8"])
def test_the_held_out_set_is_the_same_in_every_layout(tmp_path, ranks):
    assert len(held_out(tmp_path, [SHORT] * 3, "--actor-num-gpus-per-node", ranks)["held"]) == 3


def test_the_validation_loss_is_the_mean_over_supervised_tokens():
    samples = [TrainSample([1, 2, 3], [0, 1, 1]), TrainSample([1, 2], [0, 1])]
    metrics = held_out_metrics("h", samples, [9.0, -1.0, -2.0, 9.0, -3.0])
    assert metrics == {
        "eval/h/loss": 2.0, "eval/h/perplexity": pytest.approx(2.718281828459045**2), "eval/h/samples": 2.0,
        "eval/h/supervised_tokens": 3.0,
    }  # fmt: skip
