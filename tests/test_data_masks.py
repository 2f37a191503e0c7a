"""SFT masks under the templates of three model families: supervised is what the assistant wrote, and nothing else."""

from __future__ import annotations

import functools
import json

import pytest
from chat_templates import QWEN3, QWEN25, SMOLLM2
from hypothesis import given, settings
from hypothesis import strategies as st
from test_data_rendering import TOOLS, assistant, byte_tokenizer, template_ids, tool, user

from slime_retool.chat import ChatTemplate
from slime_retool.data.loss_mask import tokenize_conversation
from slime_retool.errors import DataError
from slime_retool.rollout.sft_tokens import ConversationTokenizer

TEXT = st.text(alphabet=st.sampled_from("ab1 \n\t{}<>\"'\\é日🙂\u2028"), max_size=12)
WORDS = st.text(alphabet=st.sampled_from('ab1 {}"é日'), min_size=1, max_size=10).map(lambda text: f"x{text}x")
SCHEMA = [
    {
        "type": "function",
        "function": {
            "name": "code_interpreter",
            "parameters": {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
        },
    }
]


@st.composite
def conversations(draw, *, with_thoughts: bool):
    """Questions, answers, calls (also several at once) and what they print, and another question at times."""
    messages = [{"role": "system", "content": draw(TEXT)}] if draw(st.booleans()) else []
    messages.append(user(draw(TEXT)))
    for _ in range(draw(st.integers(0, 3))):
        codes = draw(st.lists(TEXT, max_size=3))
        messages.append(assistant(_said(draw, with_thoughts), *codes))
        messages += [tool(draw(TEXT)) for _ in codes] or [user(draw(TEXT))]
    return [*messages, assistant(_said(draw, with_thoughts))]


def _said(draw, with_thoughts: bool) -> str:
    thought = f"<think>\n{draw(WORDS)}\n</think>\n\n" if with_thoughts and draw(st.booleans()) else ""
    return thought + draw(WORDS)


def supervised(ids, mask, tokenizer) -> list[str]:
    assert len(ids) == len(mask) and set(mask) <= {0, 1}
    runs: list[list[int]] = [[]]
    for token, learned in zip(ids, mask, strict=True):
        if learned:
            runs[-1].append(token)
        elif runs[-1]:
            runs.append([])
    return [tokenizer.decode(run) for run in runs if run]


def calls_text(message) -> list[str]:
    texts = (json.dumps(call["function"]["arguments"], ensure_ascii=False) for call in message.get("tool_calls", []))
    return [f'<tool_call>\n{{"name": "code_interpreter", "arguments": {text}}}\n</tool_call>' for text in texts]


def written_by_qwen25(messages) -> list[str]:
    return [
        "\n".join([message["content"], *calls_text(message)]) + "<|im_end|>"
        for message in messages
        if message["role"] == "assistant"
    ]


def written_by_qwen3(messages) -> list[str]:
    question = max(i for i, message in enumerate(messages) if message["role"] == "user")
    turns = []
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        thought, closed, text = message["content"].rpartition("\n</think>\n\n")
        thought = thought.removeprefix("<think>\n")
        if number > question and (closed or number == len(messages) - 1):
            text = f"<think>\n{thought}\n</think>\n\n{text}"
        turns.append("\n".join([text, *calls_text(message)]) + "<|im_end|>")
    return turns


@settings(max_examples=334, deadline=None)
@given(conversations(with_thoughts=True))
def test_qwen25_supervises_exactly_what_the_assistant_wrote(messages):
    tokenizer = byte_tokenizer(QWEN25)
    ids, mask = tokenize_conversation(ChatTemplate(tokenizer), messages, SCHEMA)
    assert ids == template_ids(tokenizer, messages, SCHEMA)
    assert supervised(ids, mask, tokenizer) == written_by_qwen25(messages)


@settings(max_examples=334, deadline=None)
@given(conversations(with_thoughts=True))
def test_qwen3_supervises_exactly_what_its_template_keeps_of_the_assistant(messages):
    tokenizer = byte_tokenizer(QWEN3)
    ids, mask = tokenize_conversation(ChatTemplate(tokenizer), messages, SCHEMA)
    assert ids == template_ids(tokenizer, messages, SCHEMA)
    assert supervised(ids, mask, tokenizer) == written_by_qwen3(messages)


@st.composite
def solutions(draw):
    """One question and a solution with code blocks."""
    messages = [user(draw(TEXT))]
    for _ in range(draw(st.integers(0, 3))):
        codes = [f"print({draw(WORDS)!r})" for _ in range(draw(st.integers(1, 2)))]
        messages += [assistant(draw(WORDS), *codes), *(tool(draw(TEXT)) for _ in codes)]
    return [*messages, assistant(draw(WORDS))]


@settings(max_examples=334, deadline=None)
@given(solutions())
def test_smollm2_supervises_code_and_prose_and_no_interpreter_block(messages):
    """Its template knows no tools, so calls are code blocks and outputs interpreter blocks of one message."""
    tokenizer = byte_tokenizer(SMOLLM2)
    ids, mask = _retool()(messages, SCHEMA)
    pieces, text = [], ""
    for message in messages[1:]:
        if message["role"] == "assistant":
            text = message["content"].strip()
            for call in message.get("tool_calls", []):
                block = f"<code>\n```python\n{call['function']['arguments']['code']}\n```\n</code>"
                pieces.append(f"{text}\n{block}" if text else block)
                text = ""
    pieces.append(f"{text}<|im_end|>")
    assert supervised(ids, mask, tokenizer) == pieces
    hidden = tokenizer.decode([token for token, learned in zip(ids, mask, strict=True) if not learned])
    outputs = [message["content"] for message in messages if message["role"] == "tool"]
    assert hidden.partition("<|im_start|>user")[2].count("\n<interpreter>\n") == len(outputs)


def _calling(arguments, name="code_interpreter"):
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


@functools.cache
def _retool() -> ConversationTokenizer:
    return ConversationTokenizer("retool", byte_tokenizer(SMOLLM2))


def test_smollm2_refuses_tools_in_the_format_that_its_template_would_drop():
    messages = [user("q"), assistant("x", "1"), tool("1"), assistant("y")]
    with pytest.raises(DataError, match="does not show the tool"):
        ConversationTokenizer("qwen", byte_tokenizer(SMOLLM2))(messages, TOOLS)


def test_smollm2_masks_plain_conversations_also_with_tool_turns():
    tokenizer = byte_tokenizer(SMOLLM2)
    messages = [user("q"), assistant("x"), tool("1"), assistant("y")]
    ids, mask = tokenize_conversation(ChatTemplate(tokenizer), messages)
    assert supervised(ids, mask, tokenizer) == ["x<|im_end|>", "y<|im_end|>"]


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([user("q"), assistant("x"), user("r"), assistant("y")], "followed by assistant and tool messages only"),
        ([user("q"), assistant("x", "1"), assistant("y")], "message 1 has a call .*give each call a tool message"),
        ([user("q"), assistant("x", "1"), tool("1"), tool("2"), assistant("y")], "message 4 .* as many calls .*; give"),
        ([user("q"), assistant("x"), assistant("y")], "must be the last one"),
        ([user("q"), assistant("x", "```\n</code>"), tool("1"), assistant("y")], "cannot be written"),
        ([user("q"), assistant("x<|im_end|>")], "which ends a turn"),
        ([user("q"), _calling({}), tool("1"), assistant("y")], "text as 'code' and nothing else"),
        ([user("q"), _calling({"code": "1", "n": 2}), tool("1"), assistant("y")], "text as 'code' and nothing else"),
        ([user("q"), _calling({"code": 1}), tool("1"), assistant("y")], "text as 'code' and nothing else"),
        ([user("q"), _calling({"query": "1"}, "search"), tool("1"), assistant("y")], "a call of 'search'"),
    ],
)
def test_the_retool_format_refuses_what_it_cannot_hold(messages, words):
    with pytest.raises(DataError, match=words):
        _retool()(messages, SCHEMA)
