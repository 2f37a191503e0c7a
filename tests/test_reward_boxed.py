r"""Which answer a response states: boxes at any depth, and nothing that only a tool's text holds."""

from __future__ import annotations

import pytest

from slime_retool.reward.boxed import last_answer, last_boxed, published_box, without_tool_text


@pytest.mark.parametrize(
    ("text", "boxed", "published"),
    [
        (r"\boxed{1}", "1", "1"),
        (r"\boxed{1} then \boxed{2}", "2", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}", r"\frac{1}{2}"),
        (r"\boxed{a{b{c}d}e}f}", "a{b{c}d}e", "a{b{c}d}e"),
        (r"\boxed{x + \boxed{7}}", r"x + \boxed{7}", "7"),
        (r"\boxed{1} \boxed{2", "1", None),
        (r"\boxed {3}", "3", None),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}", r"\{1, 2\}"),
        (r"{{}} } \boxed{4}", "4", "4"),
        (r"\boxed{}", "", ""),
        ("no box {1}", None, None),
        (r"\boxed", None, None),
        ("", None, None),
    ],
)
def test_the_last_box_that_is_closed(text: str, boxed: str | None, published: str | None):
    assert (last_boxed(text), published_box(text)) == (boxed, published)
    assert (last_boxed("so " + text + "."), published_box("so " + text + ".")) == (boxed, published)


def test_a_stated_answer_counts_where_there_is_no_box():
    assert last_answer("Answer: 41\nAnswer: 42.") == "42"
    assert last_answer("**Answer:** 42") == "42" and last_answer("So the answer is 7.") == "7"
    assert last_answer(r"\boxed{1} Answer: 2") == "1"
    assert last_answer("nothing") is None


def test_a_stated_answer_counts_within_the_last_2000_characters_only():
    text = "Answer: 5"
    assert last_answer(text + " " * (2000 - len(text))) == "5"
    assert last_answer(text + " " * (2001 - len(text))) is None and last_answer(text + " " * 3000) is None


@pytest.mark.parametrize("tag", ["tool_call", "tool_response", "code", "interpreter"])
def test_tool_text_is_blanked_at_the_same_length(tag: str):
    tool = rf"<{tag}>\boxed{{1}}</{tag}>"
    text = f"a{tool}b{tool}c"
    blanked = without_tool_text(text)
    assert len(blanked) == len(text) and blanked == "a" + "\n" * len(tool) + "b" + "\n" * len(tool) + "c"
    assert without_tool_text(tool) == "\n" * len(tool)
    unclosed = rf"a{tool}b<{tag}>\boxed{{2}}"
    assert without_tool_text(unclosed) == "a" + "\n" * len(tool) + rf"b<{tag}>\boxed{{2}}"


CALLS = {
    "retool": '<code>\n```python\nprint(r"\\boxed{42}")\nfor i in range(',
    "qwen": '<tool_call>\n{"name": "code_interpreter", "arguments": {"code": "print(r\'\\\\boxed{42}\')\\nfor i',
}


@pytest.mark.parametrize("kind", CALLS)
def test_a_box_in_a_call_that_was_cut_off_is_no_answer(kind: str) -> None:
    call = CALLS[kind]
    assert last_answer(without_tool_text(f"Let me see. {call}")) is None
    assert last_answer(without_tool_text(f"\\boxed{{1}} {call}")) == "1"
    # One that was not closed, but answered, has further turns.
    for further in ("<tool_response>unreadable</tool_response>", "<|im_end|>\n"):
        assert last_answer(without_tool_text(f"{call}{further} It is \\boxed{{7}}")) == "7"
