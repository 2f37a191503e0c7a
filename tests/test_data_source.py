"""Readers and the prompt source: rows come back as written, and their order survives a resume."""

from __future__ import annotations

import gzip
import json
from decimal import Decimal

import pytest
from test_data_rendering import byte_tokenizer

from slime_retool.commands.data_check import check_file
from slime_retool.config import parse_config
from slime_retool.config.data_sets import parse_data_sets
from slime_retool.data.messages import parse_messages, parse_tools
from slime_retool.data.questions import read_label
from slime_retool.data.readers import read_rows, write_rows
from slime_retool.data.rows import samples_from_file
from slime_retool.data.source import PromptDataSource, copy_sample, load_eval_samples
from slime_retool.errors import ConfigError, DataError

SCHEMAS = [
    {
        "type": "function",
        "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"x": 1}}}},
    },
    {
        "type": "function",
        "function": {"name": "say", "parameters": {"type": "object", "properties": {"t": {"y": 2}}}},
    },
]


def jsonl(path, rows):
    write_rows(path, rows)
    return str(path)


def source(tmp_path, count, *flags):
    file = jsonl(tmp_path / "p.jsonl", [{"prompt": f"{i:03}", "label": i} for i in range(count)])
    return PromptDataSource(parse_config(["--prompt-data", file, *flags]), byte_tokenizer())


def prompts(data, count):
    return [group[0].prompt for group in data.next_groups(count)]


# Readers


@pytest.mark.parametrize("extension", ["jsonl", "parquet"])
def test_rows_come_back_exactly_as_written(tmp_path, extension):
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    messages = [
        {"role": "user", "content": "line\u2028separator\x85 and\r\nmore"},
        {"role": "assistant", "content": "", "tool_calls": [call, call]},
        {"role": "tool", "content": "é"},
    ]
    rows = [{"messages": messages[:n], "tools": SCHEMAS[:t], "n": n} for n in (3, 1) for t in (2, 1)]
    write_rows(tmp_path / f"rows.{extension}", rows)
    assert read_rows(tmp_path / f"rows.{extension}") == rows


def test_numpy_arrays_written_by_pandas_come_back_as_lists(tmp_path):
    import numpy
    import pandas

    frame = pandas.DataFrame({"a": [numpy.array([1, 2])], "m": [numpy.array([{"role": "user", "content": "x"}])]})
    frame.to_parquet(tmp_path / "f.parquet")
    assert read_rows(tmp_path / "f.parquet") == [{"a": [1, 2], "m": [{"role": "user", "content": "x"}]}]


def test_a_null_that_json_lines_state_is_kept(tmp_path):
    rows = [{"tools": [{"name": "f", "default": None}], "label": None}]
    assert read_rows(jsonl(tmp_path / "f.jsonl", rows)) == rows


def test_a_bad_line_is_named_by_file_and_number(tmp_path):
    half_an_emoji = b'{"a": "\\ud83d\\ude00"}\n{"a": "\\ud83d"}\n'
    for number, text in (
        (2, b'{"a": 1}\n{"a": \n'), (3, b'{"a": 1}\n\n[1]\n'), (1, b'{"a": "\xff"}\n'), (2, half_an_emoji),
    ):  # fmt: skip
        (tmp_path / "bad.jsonl").write_bytes(text)
        with pytest.raises(DataError, match=rf"bad.jsonl, line {number}"):
            read_rows(tmp_path / "bad.jsonl")


@pytest.mark.parametrize(
    ("begin", "what"),
    [(gzip.compress(b"{}", mtime=0), "compressed by gzip"), (b"PK\x03\x04", "a zip"), (b"PAR1", "a parquet")],
)
def test_a_file_that_only_its_name_makes_json_is_named(begin: bytes, what: str, tmp_path):
    (tmp_path / "rows.jsonl").write_bytes(begin)
    with pytest.raises(DataError, match=f"rows.jsonl is {what}.*: unpack or rename it first"):
        read_rows(tmp_path / "rows.jsonl")


def test_a_file_that_is_missing_empty_broken_or_of_another_kind_is_refused(tmp_path):
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "broken.parquet").write_bytes(b"not parquet")
    (tmp_path / "table.csv").touch()
    for name, error, words in (
        ("nowhere.jsonl", ConfigError, "does not exist"),
        ("table.csv", ConfigError, "must end in"),
        ("empty.jsonl", DataError, "holds no rows"),
        ("broken.parquet", DataError, "not a readable parquet"),
    ):
        with pytest.raises(error, match=words):
            read_rows(tmp_path / name)


def test_parquet_output_that_cannot_hold_the_rows_is_a_clear_error(tmp_path):
    for rows in ([{"a": [{"b": 1}]}, {"a": "text"}], [{"a": 1 << 70}]):
        with pytest.raises(DataError, match="write .jsonl instead"):
            write_rows(tmp_path / "x.parquet", rows)


@pytest.mark.parametrize(
    ("value", "label"),
    [(34.0, "34"), (Decimal("5.00"), "5"), (0.5, "0.5"), (-3.0, "-3"), (float("nan"), None), (Decimal("NaN"), None)],
)
def test_a_label_that_a_table_made_a_float_of_is_the_integer_it_was(value, label):
    """As a parquet column of integers has them where one is missing; the dapo rule compares text."""
    assert read_label({"label": value}, "label") == label


# Messages and tools


def test_both_spellings_of_arguments_and_json_text_become_one_form():
    call = {"type": "function", "function": {"name": "f", "arguments": {"code": "1"}}}
    as_text = {"function": {"name": "f", "arguments": '{"code": "1"}'}}
    for calls in ([call], [as_text], json.dumps([as_text]), [{"name": "f", "arguments": {"code": "1"}}]):
        message = {"role": "assistant", "content": None, "tool_calls": calls}
        assert parse_messages([message], "m") == [{"role": "assistant", "content": "", "tool_calls": [call]}]


def test_half_of_a_surrogate_pair_in_json_text_is_refused_and_a_whole_one_is_read():
    text = '[{"role": "user", "content": "%s"}]'
    assert parse_messages(text % "\\ud83d\\ude00", "m")[0]["content"] == "\U0001f600"
    with pytest.raises(DataError, match="m must be .* surrogates not allowed"):
        parse_messages(text % "\\ud83d", "m")


def test_tools_may_be_a_list_or_json_text():
    for value in (SCHEMAS, json.dumps(SCHEMAS), [json.dumps(schema) for schema in SCHEMAS]):
        assert parse_tools(value, "tools") == SCHEMAS
    assert parse_tools([], "tools") is None and parse_tools(None, "tools") is None and parse_tools("[]", "t") is None


@pytest.mark.parametrize(
    "value",
    [
        [], "no json", [{"role": "robot", "content": ""}], [{"role": "user", "content": ["a"]}], ["text"],
        [{"role": "user", "content": "", "tool_calls": [{"function": {"name": "f"}}]}],
        [{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": "1 +"}}]}],
        [{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": [1]}}]}],
        [{"role": "assistant", "content": "", "tool_calls": [{"function": {}}]}],
    ],
)  # fmt: skip
def test_malformed_messages_are_refused_by_name(value):
    with pytest.raises(DataError, match="row 7"):
        parse_messages(value, "row 7")


# Samples


def test_a_text_prompt_becomes_a_user_message_only_with_apply_chat_template(tmp_path):
    file = jsonl(tmp_path / "p.jsonl", [{"prompt": "[{x}] = ?", "label": 5, "metadata": {"kind": "k"}}])
    plain = samples_from_file(file, parse_config([]))[0]
    assert (plain.prompt, plain.label, plain.metadata) == ("[{x}] = ?", "5", {"kind": "k"})
    chat = samples_from_file(file, parse_config(["--apply-chat-template"]))[0]
    assert chat.prompt == [{"role": "user", "content": "[{x}] = ?"}]


def test_messages_as_json_text_become_a_conversation(tmp_path):
    messages = [{"role": "user", "content": "hi"}]
    file = jsonl(tmp_path / "p.jsonl", [{"prompt": json.dumps(messages), "tools": json.dumps(SCHEMAS)}])
    sample = samples_from_file(file, parse_config([]))[0]
    assert sample.prompt == messages and sample.tools == SCHEMAS and sample.label is None


def test_verls_schema_is_read(tmp_path):
    row = {
        "data_source": "math", "prompt": [{"role": "user", "content": "q"}], "ability": "math",
        "reward_model": {"ground_truth": "034", "style": "rule"}, "extra_info": {"index": 3},
    }  # fmt: skip
    write_rows(tmp_path / "verl.parquet", [row])
    sample = samples_from_file(tmp_path / "verl.parquet", parse_config([]))[0]
    assert (sample.label, sample.metadata) == ("034", {"data_source": "math", "index": 3})


def test_a_missing_column_is_named_with_those_there_are(tmp_path):
    with pytest.raises(DataError, match="row 1: no column 'question', only prompt, label"):
        source(tmp_path, 1, "--input-key", "question")


def test_evaluation_sets_use_their_own_columns(tmp_path):
    one = jsonl(tmp_path / "a.jsonl", [{"input": "q1", "output": "1"}, {"input": "q2", "output": "2"}])
    flags = ["--eval-input-key", "input", "--eval-label-key", "output", "--apply-chat-template"]
    sets = load_eval_samples(parse_config(["--eval-prompt-data", "aime", one, "again", one, *flags]))
    assert list(sets) == ["aime", "again"]
    assert [(s.prompt[0]["content"], s.label, s.index) for s in sets["aime"]] == [
        ("q1", "1", 0),
        ("q2", "2", 1),
    ]


def test_a_copied_sample_shares_nothing_that_a_hook_could_change(tmp_path):
    file = jsonl(tmp_path / "p.jsonl", [{"prompt": [{"role": "user", "content": "q"}], "metadata": {"seen": []}}])
    original = samples_from_file(file, parse_config([]))[0]
    copied = copy_sample(original, 8, 4)
    copied.metadata["seen"].append(1)
    copied.prompt.append({"role": "assistant", "content": "a"})
    assert original.metadata == {"seen": []} and len(original.prompt) == 1
    assert (copied.index, copied.group_index) == (8, 4)


# Order


def test_groups_hold_n_fresh_samples_with_unique_indices_across_epochs(tmp_path):
    data = source(tmp_path, 3, "--n-samples-per-prompt", "2")
    groups = data.next_groups(4)
    assert [[s.index for s in g] for g in groups] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert [[s.group_index for s in g] for g in groups] == [[0, 0], [1, 1], [2, 2], [3, 3]]
    assert [g[0].prompt for g in groups] == ["000", "001", "002", "000"]
    assert groups[0][0] is not groups[0][1] and data.num_rows == 3


def test_every_epoch_is_whole_and_shuffled_by_seed_and_epoch(tmp_path):
    first, again, other = (source(tmp_path, 20, "--rollout-shuffle", "--rollout-seed", s) for s in ("1", "1", "2"))
    epochs = [prompts(first, 20), prompts(first, 20)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == [f"{i:03}" for i in range(20)]
    assert epochs[0] != epochs[1]
    assert prompts(again, 40) == epochs[0] + epochs[1]
    assert prompts(other, 20) != epochs[0]


@pytest.mark.parametrize("taken", [0, 1, 7, 10, 13, 25])
def test_a_resumed_run_goes_on_exactly_where_it_stopped(tmp_path, taken):
    whole, stopped, resumed = (source(tmp_path, 10, "--rollout-shuffle") for _ in range(3))
    expected = [(g[0].prompt, g[0].index, g[0].group_index) for g in whole.next_groups(taken + 25)][taken:]
    stopped.next_groups(taken)
    resumed.load_state_dict(json.loads(json.dumps(stopped.state_dict())))
    assert [(g[0].prompt, g[0].index, g[0].group_index) for g in resumed.next_groups(25)] == expected


def test_returned_rows_come_first_also_after_a_resume(tmp_path):
    stopped, resumed = (source(tmp_path, 6, "--rollout-shuffle", "--n-samples-per-prompt", "2") for _ in range(2))
    drawn = stopped.next_groups(4)
    order = [group[0].prompt for group in drawn]
    stopped.return_groups([drawn[1], drawn[3]])
    resumed.load_state_dict(json.loads(json.dumps(stopped.state_dict())))
    for data in (stopped, resumed):
        again = data.next_groups(4)
        assert [group[0].prompt for group in again[:2]] == [order[1], order[3]]
        assert sorted(order + [group[0].prompt for group in again[2:]]) == [f"{i:03}" for i in range(6)]
        assert [sample.index for group in again for sample in group] == list(range(8, 16))


def test_a_returned_row_is_found_although_the_length_filter_left_others_out(tmp_path):
    file = jsonl(tmp_path / "p.jsonl", [{"prompt": "x" * 50}, {"prompt": "a"}, {"prompt": "b"}])
    data = PromptDataSource(parse_config(["--prompt-data", file, "--rollout-max-prompt-len", "5"]), byte_tokenizer())
    first = data.next_groups(1)
    data.return_groups(first)
    assert prompts(data, 2) == ["a", "b"]


def test_a_position_is_refused_when_the_data_or_its_order_changed(tmp_path):
    state = source(tmp_path, 10, "--rollout-shuffle").state_dict()
    for count, flags, key in ((9, ["--rollout-shuffle"], "num_rows"), (10, [], "rollout_shuffle")):
        with pytest.raises(ConfigError, match=f"taken with {key}"):
            source(tmp_path, count, *flags).load_state_dict(state)


@pytest.mark.parametrize("extension", ["jsonl", "parquet"])
def test_a_position_is_refused_when_as_many_rows_are_others_or_in_another_order(tmp_path, extension):
    rows = [{"prompt": f"{i}", "label": str(i), "tools": SCHEMAS, "metadata": {"k": i}} for i in range(4)]

    def data(rows):
        file = jsonl(tmp_path / f"p.{extension}", rows)
        return PromptDataSource(parse_config(["--prompt-data", file, "--rollout-shuffle"]), byte_tokenizer())

    state = json.loads(json.dumps(data(rows).state_dict()))
    changes = ({"prompt": "x"}, {"label": "x"}, {"tools": SCHEMAS[:1]}, {"metadata": {"k": 9}})
    for others in (rows[::-1], *([*rows[:3], rows[3] | change] for change in changes)):
        with pytest.raises(ConfigError, match="taken with row_digests .* the same rows in the same order"):
            data(others).load_state_dict(state)
    data(rows).load_state_dict(state)


def test_of_a_mixture_every_set_is_compared_and_their_order_counts(tmp_path):
    values = ("@@a.jsonl@1", "@@b.jsonl@1")
    state = mixture(tmp_path, *values, sizes=(("a", 3), ("b", 3))).state_dict()
    a, b = (tmp_path / f"{name}.jsonl" for name in "ab")
    flags = ["--prompt-data", f"a={b}@1", f"b={a}@1", "--rollout-shuffle", "--rollout-seed", "1"]
    with pytest.raises(ConfigError, match="taken with row_digests"):
        PromptDataSource(parse_config(flags), byte_tokenizer()).load_state_dict(state)


def test_a_position_that_was_taken_without_digests_is_still_resumed(tmp_path):
    stopped, resumed = (source(tmp_path, 5, "--rollout-shuffle") for _ in range(2))
    expected = [prompts(stopped, 2), state := stopped.state_dict(), prompts(stopped, 3)][2]
    del state["row_digests"]
    resumed.load_state_dict(state)
    assert prompts(resumed, 3) == expected


def test_a_row_that_the_template_refuses_is_named_by_the_length_filter(tmp_path):
    template = "{% if messages[0].content == 'bad' %}{{ raise_exception('no such word') }}{% endif %}x"
    file = jsonl(tmp_path / "p.jsonl", [{"prompt": [{"role": "user", "content": text}]} for text in ("ok", "bad")])
    config = parse_config(["--prompt-data", file, "--rollout-max-prompt-len", "9"])
    with pytest.raises(DataError, match=r"p.jsonl, row 2: the chat template refuses .* no such word"):
        PromptDataSource(config, byte_tokenizer(template))


def test_the_length_filter_counts_tokens_and_without_a_limit_drops_nothing(tmp_path):
    rows = [{"prompt": [{"role": "user", "content": text}]} for text in ("ab", "日日", "abcdef")]
    file = jsonl(tmp_path / "p.jsonl", rows)
    short = len(byte_tokenizer().apply_chat_template(
        rows[1]["prompt"], add_generation_prompt=True, tokenize=True, return_dict=False
    ))  # fmt: skip
    limited = PromptDataSource(
        parse_config(["--prompt-data", file, "--rollout-max-prompt-len", str(short - 1)]), byte_tokenizer()
    )
    # Two characters of three bytes each are six tokens here, as many as "abcdef".
    assert (limited.num_rows, limited.num_dropped) == (1, 2)
    unlimited = PromptDataSource(parse_config(["--prompt-data", file]), byte_tokenizer())
    assert (unlimited.num_rows, unlimited.num_dropped) == (3, 0)
    with pytest.raises(DataError, match="all 3 prompts have more than --rollout-max-prompt-len 1 tokens"):
        PromptDataSource(parse_config(["--prompt-data", file, "--rollout-max-prompt-len", "1"]), byte_tokenizer())


LABELS = [
    ("42\r", "42"), (" 17 ", "17"), ("1,080", "1080"), ("-12,345,678", "-12345678"), ("1,08", "1,08"),
    ("1, 080", "1, 080"), ("(1,080)", "(1,080)"), (5, "5"), (0, "0"), (0.5, "0.5"), (True, "true"),
    ([1, 2], "[1, 2]"), ("so\n#### 7 ", "7"), ("x\n#### 1,009", "1009"),
    (None, None), (float("nan"), None), ("", None), (" \n", None), ("so\n#### ", None),
]  # fmt: skip


@pytest.mark.parametrize(("value", "label"), LABELS)
@pytest.mark.parametrize("column", ["label", "reward_model"])
def test_check_training_and_evaluation_read_a_label_alike(tmp_path, caplog, value, label, column):
    row = {"prompt": "q", column: {"ground_truth": value} if column == "reward_model" else value}
    file = jsonl(tmp_path / "p.jsonl", [{"prompt": "q", "label": "1"}, row])
    (group,) = PromptDataSource(parse_config(["--prompt-data", f"{file}@[1:2]"]), byte_tokenizer()).next_groups(1)
    evaluated = load_eval_samples(parse_config(["--eval-prompt-data", "e", file]))["e"][1]
    assert (group[0].label, evaluated.label) == (label, label)
    report = check_file(file)
    assert report.labels == {"q": {"1"} | ({label} if label else set())}
    if label is None:
        assert "1 of 2 rows have no label in column 'label'; the first: row 2" in caplog.text
        assert [failure.partition(": the row")[0] for failure in report.failures] == ["row 2"]


def test_a_parquet_file_of_numbers_and_gaps_has_labels_and_gaps(tmp_path):
    import pandas

    pandas.DataFrame({"prompt": ["a", "b", "c"], "label": [1.5, None, float("nan")]}).to_parquet(tmp_path / "p.parquet")
    samples = samples_from_file(tmp_path / "p.parquet", parse_config([]))
    assert [sample.label for sample in samples] == ["1.5", None, None]


def test_gsm8ks_worked_solutions_are_labels_of_their_final_answer(tmp_path):
    rows = [{"question": "q", "answer": "4 + 5 = <<4+5=9>>9\n#### 1,009"}, {"question": "q", "answer": "a #### b"}]
    file = jsonl(tmp_path / "g.jsonl", rows)
    samples = samples_from_file(file, parse_config(["--input-key", "question", "--label-key", "answer"]))
    assert [sample.label for sample in samples] == ["1009", "a #### b"]


@pytest.mark.parametrize(("rows", "expected"), [("[1:3]", [1, 2]), ("[:2]", [0, 1]), ("[-1:]", [4]), ("[3:]", [3, 4])])
def test_a_slice_of_rows_can_be_taken(tmp_path, rows, expected):
    file = jsonl(tmp_path / "p.jsonl", [{"n": n} for n in range(5)])
    assert [row["n"] for row in read_rows(f"{file}@{rows}")] == expected
    with pytest.raises(DataError, match=r"has 5 rows, none of them in \[7:\]"):
        read_rows(f"{file}@[7:]")


# Mixtures


def mixture(tmp_path, *values, seed="1", sizes=(("a", 6), ("b", 3))):
    for name, size in sizes:
        jsonl(tmp_path / f"{name}.jsonl", [{"prompt": f"{name}{i}", "label": "1"} for i in range(size)])
    values = [value.replace("@@", f"{tmp_path}/") for value in values]
    flags = ["--prompt-data", *values, "--rollout-shuffle", "--rollout-seed", seed]
    return PromptDataSource(parse_config(flags), byte_tokenizer())


def test_data_sets_are_mixed_by_weight_in_every_stretch(tmp_path):
    data = mixture(tmp_path, "easy=@@a.jsonl@1", "hard=@@b.jsonl@3")
    samples = [group[0] for group in data.next_groups(400)]
    assert all(sample.prompt.startswith({"easy": "a", "hard": "b"}[sample.source]) for sample in samples)
    for start in range(0, 400, 4):
        assert sorted(sample.source for sample in samples[start : start + 4]) == ["easy", "hard", "hard", "hard"]
    # Every pass over a data set is whole.
    hard = [sample.prompt for sample in samples if sample.source == "hard"]
    assert all(sorted(hard[i : i + 3]) == ["b0", "b1", "b2"] for i in range(0, 300, 3))


def test_without_weights_every_row_comes_once_an_epoch(tmp_path):
    data = mixture(tmp_path, "@@a.jsonl", "@@b.jsonl")
    assert data.num_rows == 9
    for _ in range(3):
        epoch = [group[0] for group in data.next_groups(9)]
        assert sorted(s.prompt for s in epoch) == [*(f"a{i}" for i in range(6)), *(f"b{i}" for i in range(3))]
        assert {s.source for s in epoch} == {"a", "b"}


@pytest.mark.parametrize("taken", [0, 1, 5, 9, 17, 40])
def test_a_mixture_resumes_exactly_where_it_stopped(tmp_path, taken):
    values = ("@@a.jsonl@2", "hard=@@b.jsonl@0.7")
    whole, stopped, resumed = (mixture(tmp_path, *values) for _ in range(3))
    expected = [(g[0].prompt, g[0].index) for g in whole.next_groups(taken + 40)][taken:]
    stopped.next_groups(taken)
    resumed.load_state_dict(json.loads(json.dumps(stopped.state_dict())))
    assert [(g[0].prompt, g[0].index) for g in resumed.next_groups(40)] == expected
    with pytest.raises(ConfigError, match="taken with data_sets"):
        mixture(tmp_path, "@@a.jsonl@3", "hard=@@b.jsonl@0.7").load_state_dict(stopped.state_dict())


def test_one_file_has_a_source_only_when_it_is_named(tmp_path):
    (plain,), (named,) = (
        mixture(tmp_path, "@@a.jsonl").next_groups(1)[0],
        mixture(tmp_path, "n=@@a.jsonl").next_groups(1)[0],
    )
    assert (plain.source, named.source) == ("", "n")


def test_values_of_prompt_data_are_read_as_name_file_slice_and_weight(tmp_path):
    def read(value):
        (found,) = parse_data_sets([value])
        return found.name, found.file, found.weight

    assert read("d/x.jsonl") == ("x", "d/x.jsonl", None)
    assert read("n=d/x.jsonl@0.5") == ("n", "d/x.jsonl", 0.5)
    assert read("d/x.jsonl@[3:]@2") == ("x", "d/x.jsonl@[3:]", 2.0)
    assert read("d=1/x.jsonl") == ("d", "1/x.jsonl", None)
    odd = tmp_path / "a=b@2"
    odd.touch()
    assert read(str(odd)) == ("a=b@2", str(odd), None)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (["d/x.jsonl", "e/x.jsonl"], "different names, got x, x"),
        (["a=x.jsonl@1", "b=y.jsonl"], "a weight or none; b has none"),
        (["a=x.jsonl@0"], "above 0"),
    ],
)
def test_data_sets_that_do_not_go_together_are_refused(values, words):
    with pytest.raises(ConfigError, match=words):
        parse_data_sets(values)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_a_place_that_cannot_be_written_is_named_in_one_line(name: str, tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / name).mkdir()
    for path in (tmp_path / "file" / name, tmp_path / name):
        with pytest.raises(ConfigError, match=f"^cannot write {path}: .*$"):
            write_rows(path, [{"a": 1}])
