"""Traces of --profile-rollout: where slices lie, what goes into which lane, and that the checker sees what is off."""

from __future__ import annotations

import json
import threading
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.check_trace import SHARE, Piece, differences, lost, pieces_of, problems, read_trace
from slime_retool.cluster import trainers
from slime_retool.cluster.profiler import StepProfiler, tool_calls, trainer_phases, with_tools_as_one
from slime_retool.cluster.trainers import CLOCK_EXCHANGES, Trainers
from slime_retool.config import Config
from slime_retool.engine.loads import LoadRecorder
from slime_retool.rollout.attempts import Attempts
from slime_retool.trace import NOISE, RankSpans, Trace, lay_out, trace_path, units_of
from slime_retool.types import Sample, SampleStatus, Span

NOW = 1_800_000_000.0


def span(name: str, start: float, seconds: float, **more: Any) -> Span:
    return {"name": name, "start": NOW + start, "seconds": seconds, "status": "ok", **more}


def names(units: list[list[Span]]) -> list[list[str]]:
    return [[each.span["name"] for each in track] for track in lay_out(units)]


def test_units_share_a_track_once_it_is_free_and_what_is_inside_stays_with_its_unit() -> None:
    units = [[span("a", 0, 2), span("in a", 1, 0.5)], [span("b", 1, 2), span("in b", 1, 2)], [span("c", 2, 1)]]
    assert names(units) == [["a", "in a", "c"], ["b", "in b"]]


def test_what_overlaps_within_a_unit_gets_a_track_of_its_own() -> None:
    unit = [span("whole", 0, 10), span("first", 1, 4), span("second", 3, 4), span("third", 6, 1)]
    assert names([unit]) == [["whole", "first", "third"], ["second"]]


def test_ends_that_are_off_by_noise_are_cut() -> None:
    noise = NOISE / 2e6
    unit = [
        span("whole", 0, 10),
        span("first", 1, 4 + noise),
        span("second", 5, 5 + noise),
        span("tiny", 9.9999, 0.0001),
    ]
    (track,) = lay_out([unit])
    ends = [(each.begin - track[0].begin, each.end - track[0].begin) for each in track]
    assert ends == [(0, 10_000_000), (1_000_000, 5_000_500), (5_000_500, 10_000_000), (9_999_900, 10_000_000)]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 5), st.floats(0, 3)), max_size=30), st.booleans())
def test_slices_of_any_spans_nest_and_none_is_lost_or_changed(times: list[tuple[float, float]], apart: bool) -> None:
    spans = [span(f"s{number}", start, seconds) for number, (start, seconds) in enumerate(times)]
    trace = Trace()
    trace.add("all", {"lane": [[each] for each in spans] if apart else units_of(spans)})
    events = [event for event in trace._events if event["ph"] == "X"]
    assert problems({"traceEvents": trace._events}) == []
    assert sorted(event["name"] for event in events) == sorted(each["name"] for each in spans)
    for event in events:
        start, seconds = times[int(event["name"][1:])]
        assert abs(event["ts"] / 1e6 - NOW - start) <= 1.1 * NOISE * 30 / 1e6
        assert abs(event["dur"] / 1e6 - seconds) <= 1.1 * NOISE * 30 / 1e6


@settings(max_examples=500, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 9)), max_size=8), st.booleans())
def test_slices_nest_whatever_is_cut_from_their_ends(times: list[tuple[int, int]], around: bool) -> None:
    """Ends that lie within the noise of each other, where a cut of one slice reaches into the next ones."""
    part = NOISE / 3e6
    spans = [span(f"s{number}", start * part, length * part) for number, (start, length) in enumerate(times)]
    trace = Trace()
    trace.add("all", {"lane": [[span("whole", 2 * part, 12 * part), *spans]] if around else units_of(spans)})
    assert problems({"traceEvents": trace._events}) == []
    order = {event["name"]: place for place, event in enumerate(trace._events) if event["ph"] == "X"}
    assert set(order) == {each["name"] for each in spans} | ({"whole"} if around else set())


def write(path: Path, lanes: dict[str, dict[str, list[list[Span]]]], metrics: dict[str, float]) -> dict[str, Any]:
    trace = Trace()
    for group, each in lanes.items():
        trace.add(group, each)
    trace.write(path, {"metrics": metrics})
    return read_trace(path)


METRICS = {
    "perf/step_seconds": 8.0, "perf/generate_seconds": 4.0, "perf/log_probs_seconds": 1.0, "perf/train_seconds": 2.0,
    "perf/sync_seconds": 0.5, "perf/offload_seconds": 0.0, "perf/idle_seconds": 0.5,
}  # fmt: skip
STEP = [
    span("step", 0, 9), span("generate", 0, 4), span("log_probs", 4.1, 1), span("train", 5.1, 2), span("save", 7.2, 1),
    span("sync", 8.2, 0.5),
]  # fmt: skip


def test_an_event_has_its_place_its_time_from_the_first_one_and_what_else_is_known_of_it(tmp_path: Path) -> None:
    trace = Trace()
    trace.add("one", {"lane": [[span("whole", 2, 3, tokens=7)], [span("beside", 2.5, 1)]]})
    trace.add("two", counters={"running": [(NOW + 1, {"engine 0": 4.0}), (NOW + 6.5, {"engine 0": 0.0})]})
    trace.write(tmp_path / "t.json.gz", {"rollout_id": 3})
    whole = read_trace(tmp_path / "t.json.gz")
    assert whole["otherData"] == {"rollout_id": 3, "begin": NOW + 1} and whole["displayTimeUnit"] == "ms"
    events = whole["traceEvents"]
    assert [event for event in events if event["ph"] == "X"] == [
        {"ph": "X", "cat": "slime_retool", "name": name, "pid": 1, "tid": thread, "ts": ts, "dur": dur, "args": args}
        for name, thread, ts, dur, args in [
            ("whole", 2, 1_000_000, 3_000_000, {"status": "ok", "tokens": 7}),
            ("beside", 3, 1_500_000, 1_000_000, {"status": "ok"}),
        ]
    ]
    assert [event for event in events if event["ph"] == "C"] == [
        {"ph": "C", "name": "running", "pid": 2, "ts": ts, "args": {"engine 0": value}}
        for ts, value in [(0, 4.0), (5_500_000, 0.0)]
    ]
    named = {(event["name"], event["pid"], event["tid"]): event["args"] for event in events if event["ph"] == "M"}
    assert named == {
        ("process_name", 1, 0): {"name": "one"}, ("process_sort_index", 1, 0): {"sort_index": 1},
        ("thread_name", 1, 2): {"name": "lane 1"}, ("thread_sort_index", 1, 2): {"sort_index": 2},
        ("thread_name", 1, 3): {"name": "lane 2"}, ("thread_sort_index", 1, 3): {"sort_index": 3},
        ("process_name", 2, 0): {"name": "two"}, ("process_sort_index", 2, 0): {"sort_index": 2},
    }  # fmt: skip


def test_no_lane_has_its_process_s_number_which_perfetto_would_call_the_main_thread(tmp_path: Path) -> None:
    lanes = {f"lane {number}": [[span("slice", 0, 1)]] for number in range(4)}
    events = write(tmp_path / "t.json.gz", {group: lanes for group in ("one", "two", "three")}, {})["traceEvents"]
    assert [(event["pid"], event["tid"]) for event in events if event["ph"] == "X"] == [
        (1, 2), (1, 3), (1, 4), (1, 5), (2, 1), (2, 3), (2, 4), (2, 5), (3, 1), (3, 2), (3, 4), (3, 5),
    ]  # fmt: skip


@pytest.mark.parametrize("lane", ["", None])
def test_a_lane_without_a_name_is_told_of(lane: str | None, tmp_path: Path) -> None:
    trace = write(tmp_path / "t.json.gz", {"driver": {"step": [STEP]}}, METRICS)
    next(event for event in trace["traceEvents"] if event["name"] == "thread_name")["args"]["name"] = lane
    (found,) = problems(trace)
    assert found.endswith("gives no name")


def test_slices_that_another_reader_lost_moved_or_saw_once_are_told_of(tmp_path: Path) -> None:
    unit = [span("a", 0, 3), span("b", 1.000001, 0.5), span("c", 2, 1)]
    pieces = pieces_of(write(tmp_path / "t.json.gz", {"one": {"lane": [unit]}}, {}))
    twice = [*pieces, pieces[-1]]
    assert lost(pieces, reversed(pieces)) == [] and lost(pieces, twice) == []
    assert [each.name for each in lost(twice, pieces)] == ["c"]
    for change in ({"begin": 1.000002}, {"seconds": 0.500001}, {"lane": "lane 2"}, {"group": "two"}):
        theirs = [each._replace(**change) if each.name == "b" else each for each in pieces]
        assert lost(pieces, theirs) == [Piece("one", "lane", "b", 1_000_001, 500_000)]


@pytest.mark.parametrize("factor", [1.0, 1 + SHARE * 1.5, 1 - SHARE * 1.5])
def test_lanes_that_do_not_add_up_to_a_metric_are_told_of(factor: float, tmp_path: Path) -> None:
    pieces = pieces_of(write(tmp_path / "t.json.gz", {"driver": {"step": [STEP]}}, METRICS))
    for name, metric in METRICS.items():
        found = differences(pieces, METRICS | {name: metric * factor})
        expected = factor != 1.0 and metric > 0 and name != "perf/idle_seconds"  # that one is held to the whole step
        assert bool(found) == expected and all(line.startswith(name) for line in found), (name, found)


@pytest.mark.parametrize("apart", [False, True])
def test_a_critics_lanes_add_up_too(apart: bool, tmp_path: Path) -> None:
    """Its values are of the forward-only passes; its training is a phase, unless it is beside the policy's."""
    policy, critic = [span("log_probs", 4.6, 0.5), span("train", 5.1, 2)], [span("values", 4.1, 0.5)]
    critic.append(span("train critic", *((5.1, 1.5) if apart else (7.1, 0.25))))
    ranks = [("trainer rank 0", RankSpans(policy if apart else [*critic, *policy], []))]
    ranks += [("critic rank 0", RankSpans(critic, []))] if apart else []
    step = [each for each in STEP if each["name"] not in ("log_probs", "train")]
    lanes = {"driver": {"step": units_of([*step, *trainer_phases(ranks)])}}
    lanes["trainers"] = {name: units_of(spans.host) for name, spans in ranks}
    metrics = METRICS | {"perf/critic_seconds": 1.5 if apart else 0.25}
    metrics |= {} if apart else {"perf/idle_seconds": 0.25}
    pieces = pieces_of(write(tmp_path / "t.json.gz", lanes, metrics))
    assert differences(pieces, metrics) == []
    wrong = metrics | {"perf/log_probs_seconds": 0.5}
    assert {line.partition(":")[0] for line in differences(pieces, wrong)} == {
        "perf/log_probs_seconds", "perf/log_probs_seconds of ranks"
    }  # fmt: skip


def test_a_rank_that_took_longer_than_the_metric_says_is_told_of(tmp_path: Path) -> None:
    ranks = {f"trainer rank {rank}": [[span("train", 5.1, 2 + rank)]] for rank in (0, 1)}
    pieces = pieces_of(write(tmp_path / "t.json.gz", {"driver": {"step": [STEP]}, "trainers": ranks}, METRICS))
    assert [line.partition(":")[0] for line in differences(pieces, METRICS)] == ["perf/train_seconds of ranks"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"dur": 5_000_000}, "after 'step'"),
        ({"ts": -1}, "no time"),
        ({"ts": 0.5}, "no time"),
        ({"tid": 77}, "without a name"),
        ({"ph": "B"}, "no known kind"),
        ({"name": None}, "no known kind"),
    ],
)
def test_a_file_that_breaks_the_format_is_told_of(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    trace = write(tmp_path / "t.json.gz", {"driver": {"step": [STEP]}}, METRICS)
    assert problems(trace) == []
    next(event for event in trace["traceEvents"] if event["name"] == "sync").update(change)
    found = problems(trace)
    assert found and said in found[0]


def test_calls_of_a_turn_are_one_slice_of_the_conversation_and_each_one_of_the_tools() -> None:
    calls = [
        span("tool", 1, 2, turn=1, tool="code", waited=0.5, status="ok"),
        span("tool", 1, 3, turn=1, tool="code", waited=0.0, status="error"),
        span("tool", 6, 1, turn=2, tool="search", waited=9.0, status="ok"),
        span("tool", 8, 0, turn=3, status="malformed"),
    ]
    conversation = [span("sample 7", 0, 9), span("generate", 0, 9), *calls]
    tools = [each for each in with_tools_as_one(conversation) if each["name"] == "tools"]
    assert [(each["start"] - NOW, each["seconds"], each["turn"], each["status"]) for each in tools] == [
        (1, 3, 1, "ok, error"), (6, 1, 2, "ok"), (8, 0, 3, "malformed"),
    ]  # fmt: skip
    units = tool_calls([conversation])
    assert [[(each["name"], each["seconds"]) for each in unit] for unit in units] == [
        [("code", 2), ("queue", 0.5)], [("code", 3)], [("search", 1), ("queue", 1)],
    ]  # fmt: skip
    assert {unit[0]["sample"] for unit in units} == {"sample 7"}


def test_attempts_that_ended_while_recorded_and_those_that_go_on() -> None:
    attempts = Attempts()
    before, ended, running = (Sample(prompt="", index=index, reward={"score": 1.0}) for index in range(3))
    started = [attempts.begin(sample) for sample in (before, ended, running)]
    attempts.end(started[0])
    attempts.record()
    ended.status, ended.spans = SampleStatus.COMPLETED, [{**span("generate", 0, 1), "start": started[1].start}]
    attempts.end(started[1])
    running.spans = [{**span("request", 0, 1), "start": started[2].start + 1}, span("old", -1e9, 1)]
    whole, going = attempts.take(lambda sample: [{**span("request", 0, 2), "start": started[2].start + 2}])
    assert [each["name"] for each in whole] == ["sample 1", "generate"]
    assert (whole[0]["status"], whole[0]["reward"]) == ("completed", 1.0)
    assert [each["name"] for each in going] == ["sample 2", "request", "request"] and going[0]["status"] == "goes on"
    assert [each[0]["name"] for each in attempts.take(lambda sample: [])] == ["sample 2"]  # recorded no longer


@pytest.mark.parametrize(("ahead", "seen"), [(0.0, 0.0), (0.04, 0.0), (3.0, 3.0), (-3.0, -3.0)])
def test_a_clock_is_moved_by_what_is_more_than_the_measurement_leaves_open(ahead, seen, monkeypatch) -> None:
    """The answer is made anywhere between question and arrival: an offset of less than the trip is not known."""
    trips = iter([0.5, 0.1, 0.7, 0.3, 0.9])
    clock = [NOW]

    def exchange(actors: list[Any], method: str) -> list[float]:
        trip = next(trips)
        clock[0] += trip
        return [clock[0] - trip / 2 + ahead]

    monkeypatch.setattr(trainers, "call", exchange)
    monkeypatch.setattr(trainers, "time", SimpleNamespace(time=lambda: clock[0]))
    run = Trainers(Config(hf_checkpoint="model"), [], several_hosts=True)
    monkeypatch.setattr(run, "_results", lambda answers: answers)
    assert run._clock_ahead(None) == pytest.approx(seen, abs=1e-6)
    assert CLOCK_EXCHANGES == 5 and next(trips, None) is None
    spans = RankSpans([span("train", 5, 1)], [span("forward", 6, 1)]).moved(-2)
    assert (spans.host[0]["start"], spans.device[0]["start"]) == (NOW + 3, NOW + 4)


class Loads(BaseHTTPRequestHandler):
    """An engine of two data-parallel ranks."""

    def do_GET(self) -> None:
        rank = {"num_running_reqs": 3, "num_waiting_reqs": 1, "gen_throughput": 10.5, "token_usage": 0.25}
        body = json.dumps({"loads": [rank, rank | {"token_usage": 0.5}]}).encode()
        self.send_response(200 if self.path == "/v1/loads?include=core" else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


def test_loads_of_engines_are_recorded_and_one_that_does_not_answer_leaves_a_gap() -> None:
    asked = threading.Event()
    with ThreadingHTTPServer(("127.0.0.1", 0), Loads) as server:
        threading.Thread(target=partial(server.serve_forever, 0.01), daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"

        def engines() -> dict[int, str]:
            if points["running requests"]:
                asked.set()
            return {0: url, 1: "http://127.0.0.1:1"}

        points: dict[str, list[Any]] = {"running requests": []}
        recorder = LoadRecorder(engines)
        points.update(recorder._points)
        assert asked.wait(60)
        said = recorder.stop()
        server.shutdown()
    assert {name: each[0][1] for name, each in said.items()} == {
        "running requests": {"engine 0": 6.0}, "waiting requests": {"engine 0": 2.0},
        "tokens per second": {"engine 0": 21.0}, "share of the cache in use": {"engine 0": 0.5},
    }  # fmt: skip


class Stand:
    """Rollout manager and trainers that were recorded."""

    def __init__(self, spans: list[Any]) -> None:
        self._spans, self.recorded = spans, 0

    def record(self) -> None:
        self.recorded += 1

    def take_spans(self) -> list[Any]:
        return self._spans


def test_the_slowest_rank_s_phases_stand_in_the_driver_s_lane(tmp_path: Path) -> None:
    config = Config(hf_checkpoint="model", output_dir=str(tmp_path), debug_train_only=True)
    spans = [
        (f"trainer rank {rank}", RankSpans([span("train", 5.1, 1 + rank)], [span("forward", 5.2, 0.1)]))
        for rank in (0, 1)
    ]
    rollout, ranks = Stand([[span("sample 1", 0, 4), span("generate", 0, 3)]]), Stand(spans)
    profiler = StepProfiler(config, 3, rollout, ranks, SimpleNamespace(current=dict))
    driver = [each for each in STEP if each["name"] != "train"] + [span("trainers", 4, 3.2)]
    profiler.write(driver, METRICS | {"train/loss": float("nan")})
    profiler.close()
    path = trace_path(str(tmp_path), 3)
    assert path == tmp_path / "traces" / "rollout_000003.json.gz"
    trace = read_trace(path)
    assert problems(trace) == [] and (rollout.recorded, ranks.recorded) == (1, 1)
    assert trace["otherData"]["rollout_id"] == 3 and trace["otherData"]["metrics"] == METRICS
    pieces = pieces_of(trace)
    assert differences(pieces, METRICS) == []
    (trained,) = [each for each in pieces if each.group == "driver" and each.name == "train"]
    assert trained.seconds == 2
    assert {each.lane for each in pieces if each.group == "trainers"} == {
        f"trainer rank {rank}{more}" for rank in (0, 1) for more in ("", ", GPU")
    }
