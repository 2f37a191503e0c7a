"""Every call that a model can reasonably mean is found; everything else is explained to it."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime_retool.tool_use import ToolCall, ToolCallError, parse_tool_calls, parser
from slime_retool.tool_use.calls import MAX_CALLS, TOO_MANY
from slime_retool.tool_use.schema import check_arguments

SEARCH = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Search.",
        "parameters": {
            "type": "object",
            "properties": {
                "query": {"type": "string"},
                "limit": {"type": "integer"},
                "kind": {"type": "string", "enum": ["web", "news"]},
                "tags": {"type": "array", "items": {"type": "string"}},
            },
            "required": ["query"],
        },
    },
}
CODE = {
    "type": "function",
    "function": {
        "name": "code_interpreter",
        "description": "Run Python.",
        "parameters": {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
    },
}
TOOLS = [CODE, SEARCH]
READ_CALL = parser._read_call


def wrap(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


def code_call(code: str) -> str:
    return wrap(json.dumps({"name": "code_interpreter", "arguments": {"code": code}}))


def only_error(text: str) -> str:
    (error,) = parse_tool_calls(text, TOOLS)
    assert isinstance(error, ToolCallError)
    return error.message


def test_an_answer_has_no_calls() -> None:
    assert parse_tool_calls("The answer is \\boxed{4}. {not: json} </tool_call>", TOOLS) == []


def test_code_may_contain_the_tags_themselves_and_a_sibling_survives() -> None:
    code = 'print("</tool_call>", "<tool_call>", "</think>")'
    text = f"First {code_call(code)} then {code_call('2')}"
    assert parse_tool_calls(text, TOOLS) == [
        ToolCall("code_interpreter", {"code": code}),
        ToolCall("code_interpreter", {"code": "2"}),
    ]


def test_raw_newlines_and_tabs_in_strings_are_accepted() -> None:
    text = wrap('{"name": "code_interpreter", "arguments": {"code": "if 1:\n\tprint(1)\r\n"}}')
    assert parse_tool_calls(text, TOOLS) == [ToolCall("code_interpreter", {"code": "if 1:\n\tprint(1)\r\n"})]


def test_unescaped_quotes_are_explained() -> None:
    message = only_error(wrap('{"name": "code_interpreter", "arguments": {"code": "print("hi")"}}'))
    assert "Escape double quotes" in message


def test_an_unclosed_call_is_an_error() -> None:
    assert "closing tool_call tag" in only_error('<tool_call>{"name": "code_interpreter", "arguments": {"code": "1"}}')
    assert "not valid JSON" in only_error('<tool_call>{"name": "code_interpreter", "arg')


def test_a_broken_call_does_not_hide_the_next() -> None:
    calls = parse_tool_calls("<tool_call>{bad " + code_call("1") + wrap("{bad") + code_call("2"), TOOLS)
    assert [type(call) for call in calls] == [ToolCallError, ToolCall, ToolCallError, ToolCall]


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ({}, "missing required argument 'query'"),
        ({"query": 3}, "'query' must be string, got integer 3"),
        ({"query": "x", "limit": "3"}, "'limit' must be integer, got string"),
        ({"query": "x", "limit": True}, "'limit' must be integer, got boolean"),
        ({"query": "x", "kind": "blog"}, "'kind' must be one of"),
        ({"query": "x", "tags": ["a", 1]}, "'tags[1]' must be string"),
        ({"query": "x", "page": 1}, "unknown argument 'page'"),
        (["x"], "must be a JSON object of named arguments, got list"),
        ("no json", "got text that is not JSON"),
    ],
)
def test_wrong_arguments_are_named(arguments: object, part: str) -> None:
    assert part in only_error(wrap(json.dumps({"name": "search", "arguments": arguments})))


LIMITED = {
    "type": "object",
    "properties": {
        "count": {"type": "integer", "minimum": 1},
        "code": {"type": "string", "maxLength": 8, "pattern": "^[a-z]*$"},
        "size": {"anyOf": [{"type": "number"}, {"type": "null"}]},
        "where": {"type": "array", "items": {"$ref": "#/$defs/place"}},
        "at": {"type": "object", "properties": {"x": {"type": "number", "multipleOf": 0.5}}},
        "broken": {"type": "no type of JSON"},
    },
    "$defs": {"place": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}},
}


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ({"count": 0}, "'count' must satisfy minimum 1, got 0"),
        ({"count": 1.0}, "'count' must be integer, got number 1.0"),
        ({"code": "A"}, "'code' must satisfy pattern '^[a-z]*$', got 'A'"),
        ({"code": "a" * 100_000}, "'code' must satisfy maxLength 8, got 'aaa"),
        ({"size": "x"}, "'size' must satisfy anyOf [{'type': 'number'}, {'type': 'null'}], got 'x'"),
        ({"where": [{"x": 1}, {"y": 1}]}, "missing required argument 'where[1].x'"),
        ({"at": {"y": 1}}, "unknown argument 'at.y' (known: 'x')"),
        ({"at": {"x": float("nan")}}, "cannot be checked"),
        ({"broken": 1}, "cannot be checked"),
        ({"x" * 100_000: 1}, "unknown argument 'xxx"),
    ],
)
def test_every_rule_of_json_schema_holds_and_its_error_is_short(arguments: dict[str, object], part: str) -> None:
    problem = check_arguments(arguments, LIMITED)
    assert problem is not None and part in problem and len(problem) < 600


@pytest.mark.parametrize(
    ("arguments", "schema"),
    [
        ({"count": 3, "code": "abc", "size": None, "where": [{"x": 0.5}], "at": {"x": 1.5}}, LIMITED),
        ({"anything": 1}, {"type": "object"}),
        ({"anything": 1}, {"type": "object", "properties": {"x": {}}, "additionalProperties": True}),
        ({"x": 1, "y": 2}, {"properties": {"x": {}}, "allOf": [{"properties": {"y": {}}}]}),
    ],
)
def test_arguments_that_fit_are_accepted(arguments: dict[str, object], schema: dict[str, object]) -> None:
    assert check_arguments(arguments, schema) is None


def test_a_schema_elsewhere_is_not_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: list[object] = []
    monkeypatch.setattr("urllib.request.urlopen", fetched.append)
    problem = check_arguments({"x": 1}, {"properties": {"x": {"$ref": "http://localhost:1/schema.json"}}})
    assert problem is not None and "cannot be checked" in problem and fetched == []


def test_an_unknown_tool_is_answered_with_the_known_ones() -> None:
    message = only_error(wrap('{"name": "browser", "arguments": {}}'))
    assert "'browser'" in message and "code_interpreter, search" in message


@pytest.mark.parametrize("body", ["[1]", '"x"', "null", "{}", '{"name": 3, "arguments": {}}', '{"name": "search"}'])
def test_json_that_is_not_a_call_is_an_error(body: str) -> None:
    assert 'string "name"' in only_error(wrap(body))


@pytest.mark.parametrize("body", ["[" * 100_000, '{"name": "search", "arguments": {"limit": ' + "9" * 100_000 + "}}"])
def test_degenerate_json_is_an_error_and_not_a_crash(body: str) -> None:
    (call,) = parse_tool_calls(wrap(body), TOOLS)
    assert isinstance(call, ToolCallError)


@pytest.mark.parametrize(
    "call", [wrap('{"name": "search", "arguments": {"query": "x"}}'), wrap("{bad\n"), "<tool_call>", '<tool_call>{"']
)
def test_a_turn_of_very_many_calls_is_read_up_to_a_limit(call: str, monkeypatch) -> None:
    """A malformed one costs as much as all the text before it: JSONDecodeError counts its lines."""
    read = []
    monkeypatch.setattr(parser, "_read_call", lambda text, at: read.append(at) or READ_CALL(text, at))
    calls = parse_tool_calls(call * 20_000, TOOLS)
    assert (len(read), calls[MAX_CALLS:]) == (MAX_CALLS, [TOO_MANY])
    assert TOO_MANY not in parse_tool_calls(call * MAX_CALLS, TOOLS)
    read.clear()
    assert parse_tool_calls((call * 100 + "</think>") * 200 + code_call("1"), TOOLS) == [
        ToolCall("code_interpreter", {"code": "1"})
    ]
    assert len(read) <= 2 * MAX_CALLS


def test_calls_mentioned_in_reasoning_do_not_count() -> None:
    text = f"<think>I could write <tool_call> or {code_call('1')}.</think>{code_call('2')}"
    assert parse_tool_calls(text, TOOLS) == [ToolCall("code_interpreter", {"code": "2"})]
    assert parse_tool_calls(f"{code_call('1')} no.</think>The answer is 2.", TOOLS) == []


def test_nothing_is_evaluated(tmp_path) -> None:
    target = tmp_path / "made"
    attack = f'__import__("pathlib").Path({str(target)!r}).touch()'
    for body in (attack, json.dumps({"name": "search", "arguments": attack}), "{" + attack + ": 1}"):
        parse_tool_calls(wrap(body), TOOLS)
    assert not target.exists()


# Prose without a "<" cannot contain a tag.
prose = st.text(st.characters(exclude_characters="<", exclude_categories=["Cs"]), max_size=30)
code = st.text(max_size=40) | st.sampled_from(["</tool_call>", "<tool_call>\n{", '"', "\\", "a\tb\nc", "</think>"])


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(prose, code, st.sampled_from([None, 2]), st.booleans(), st.booleans()), max_size=4), prose)
def test_calls_written_in_any_form_come_back_in_order(parts, tail: str) -> None:
    text, expected = "", []
    for before, source, indent, as_string, ascii_only in parts:
        arguments: object = {"code": source}
        if as_string:
            arguments = json.dumps(arguments)
        call = {"name": "code_interpreter", "arguments": arguments}
        text += before + wrap(json.dumps(call, indent=indent, ensure_ascii=ascii_only))
        expected.append(ToolCall("code_interpreter", {"code": source}))
    assert parse_tool_calls(text + tail, TOOLS) == expected


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(["<tool_call>", "</tool_call>", "</think>", '{"name": "search"', "}", '"', "[", "x"])))
def test_any_mixture_of_fragments_is_parsed_without_raising(fragments: list[str]) -> None:
    for call in parse_tool_calls("".join(fragments), TOOLS):
        assert isinstance(call, ToolCall | ToolCallError)
