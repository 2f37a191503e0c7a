r"""Scores: what counts as the answer, when two answers are equal, and that no text can stall the scorer."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from slime_retool.config import Config
from slime_retool.errors import ConfigError, RewardError
from slime_retool.reward import (
    RewardRunner,
    compute_score,
    conversation_messages,
    default_reward,
    format_score,
    shape_tool_use,
    symbolic,
)
from slime_retool.reward.boxed import last_boxed
from slime_retool.reward.runner import THREADS
from slime_retool.rollout.eval_metrics import _votes
from slime_retool.types import Sample

DATA = Path(__file__).parent / "data"


def boxed(answer: str) -> str:
    return f"So we get \\boxed{{{answer}}}."


def labelled(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DATA / name).read_text(encoding="utf-8").split("\n") if line]


PAIRS = labelled("score_pairs.jsonl")


def test_there_are_hundreds_of_pairs_labelled_by_hand_and_nearly_half_of_them_are_wrong() -> None:
    assert len(PAIRS) >= 1000 and f"all {len(PAIRS):,} pairs" in (DATA.parents[1] / "docs" / "data.md").read_text()
    assert 0.4 < sum(not pair["correct"] for pair in PAIRS) / len(PAIRS) < 0.6
    kinds = {"tiny", "unit", "name", "case", "prime", "magnitude", "ellipsis", "python", "thought", "inequality"}
    assert kinds <= {pair["kind"] for pair in PAIRS if pair["correct"]} & {p["kind"] for p in PAIRS if not p["correct"]}


@pytest.mark.timeout(180)
@pytest.mark.parametrize("kind", sorted({pair["kind"] for pair in PAIRS}))
def test_math_verify_agrees_with_labels_made_by_hand(kind: str) -> None:
    """Values however small, units, names and their case, Python's spelling, ...: see the `kind` of each line."""
    pairs = [pair for pair in PAIRS if pair["kind"] == kind]
    judged = [compute_score(pair["response"], pair["ground_truth"], "math_verify")["acc"] for pair in pairs]
    assert [p for p, correct in zip(pairs, judged, strict=True) if p["correct"] != correct] == []


def test_dapo_is_the_published_rule() -> None:
    """The list was labelled by hand from the rule: last 300 characters, last box, equal character for character."""
    pairs = labelled("dapo_pairs.jsonl")
    expected = [{"score": 1.0 if p["correct"] else -1.0, "acc": p["correct"], "pred": p["pred"]} for p in pairs]
    assert [compute_score(pair["response"], pair["ground_truth"]) for pair in pairs] == expected


# Of each form that the answers of MATH-500 take, one of our own, and one that is near it and not equal.
FORMS = [
    ("216", "261"), ("-128", "128"), ("12,345", "12,354"), ("3.25", "3.52"), ("0.0000512", "0.000512"),
    ("\\frac{5}{16}", "\\frac{16}{5}"), ("-\\frac{5}{8}", "\\frac{5}{8}"), ("\\frac{250}7", "\\frac{7}{250}"),
    ("136\\frac{1}{2}", "136\\frac{1}{3}"), ("\\frac{\\sqrt{5}}{5}", "\\frac{\\sqrt{5}}{3}"),
    ("2\\sqrt{117}", "117\\sqrt{2}"), ("7\\sqrt{5}+7", "7\\sqrt{5}-7"), ("1+4\\sqrt{3}", "1-4\\sqrt{3}"),
    ("30_9", "27"), ("3210_{5}", "3210_{6}"), ("250\\pi", "250"), ("-\\frac{\\pi}{8}", "-\\frac{8}{\\pi}"),
    ("\\frac{30000}{\\pi}", "30000\\pi"), ("17+2\\pi", "17-2\\pi"), ("3+7i", "3-7i"), ("3k", "k^3"),
    ("2k+4", "4k+2"), ("-11x+3", "11x+3"), ("(a+3)(b+7)", "(a+7)(b+3)"), ("5r^2-4r-20", "5r^2+4r-20"),
    ("u-v", "v-u"), ("3R^2", "2R^3"), ("\\tanx", "\\cotx"), ("\\frac{13+7a}{20}", "\\frac{7+13a}{20}"),
    ("x^6+x^5+x^4+x^3+x^2+x+1", "x^6-x^5+x^4-x^3+x^2-x+1"), ("4x-7y+9z+2=0", "4x-7y+9z-2=0"),
    ("(3,\\infty)", "[3,\\infty)"), ("(-\\infty,2]", "(-\\infty,2)"), ("(5,6]", "[5,6]"), ("x\\in[-3,8]", "(-3,8)"),
    ("(2,11)\\cup(11,99)", "(2,99)"),
    ("[\\frac{\\pi^2}{6},\\frac{5\\pi^2}{3}]", "[\\frac{\\pi^2}{3},\\frac{5\\pi^2}{6}]"),
    ("(-\\sqrt{5},\\sqrt{5})", "(\\sqrt{5},-\\sqrt{5})"), ("(4,\\frac{\\pi}{3})", "(\\frac{\\pi}{3},4)"),
    ("(1,-12,-4,41)", "(1,-12,-4)"), ("-3,1", "3,1"), ("2,5,9", "2,5"), ("3\\pm2\\sqrt{5}", "3+2\\sqrt{5}"),
    ("\\{1\\pm\\sqrt{7},-3\\}", "\\{1\\pm\\sqrt{7},3\\}"), ("{Robin}", "{Navid}"), ("{parabola}", "{circle}"),
    ("{(D)}", "{(B)}"), ("642^2", "642"),
    ("\\begin{pmatrix}-1/5\\2/5\\3/5\\end{pmatrix}", "\\begin{pmatrix}1/5\\2/5\\3/5\\end{pmatrix}"),
    ("\\begin{pmatrix}-2&0\\\\0&-2\\end{pmatrix}", "\\begin{pmatrix}0&-2\\\\-2&0\\end{pmatrix}"),
]  # fmt: skip
RESPELLINGS: dict[str, Callable[[str], str]] = {
    "itself": lambda a: a,
    "math marks and a full stop": lambda a: f"${a}$.",
    "a text wrapper": lambda a: f"\\text{{{a}}}",
    "an assignment": lambda a: f"x = {a}",
    "larger fractions": lambda a: a.replace("\\frac", "\\dfrac"),
    "sized brackets": lambda a: re.sub(r"(?<!\\)([)\]])", r"\\right\1", re.sub(r"(?<!\\)([(\[])", r"\\left\1", a)),
    "spaces": lambda a: re.sub(r"(?<![\w\\,(\[{&])([-+=])", r" \1 ", a.replace("\\cup", " \\cup ")),
    "Unicode": lambda a: a.replace("-", "−").replace("\\pi", "π").replace("\\infty", "∞").replace("\\cup", "∪"),
}


@pytest.mark.timeout(180)
def test_every_form_of_answer_matches_its_respellings_and_not_what_is_near_it() -> None:
    for truth, near in FORMS:
        for name, respell in RESPELLINGS.items():
            assert compute_score(boxed(respell(truth)), truth, "math_verify")["acc"], (name, truth)
        for a, b in ((truth, near), (near, truth)):
            assert not compute_score(boxed(a), b, "math_verify")["acc"], (a, b)


def test_prose_after_the_box_does_not_matter() -> None:
    assert compute_score(boxed("34") + " That is all." * 100, "34", "math_verify")["acc"]


def test_without_a_box_there_is_no_answer() -> None:
    assert compute_score("The answer is 34.", "34") == {"score": -1.0, "acc": False, "pred": ""}


@pytest.mark.parametrize("mode", ["dapo", "math_verify"])
def test_nothing_is_no_right_answer(mode: str) -> None:
    assert not compute_score(boxed(""), "", mode)["acc"]


def test_the_last_complete_box_counts() -> None:
    assert compute_score(boxed("1") + boxed("2"), "2")["acc"]
    assert compute_score(boxed("34") + "\\boxed{35", "34", "math_verify")["acc"]
    assert last_boxed("\\boxed{ {a {b {c}}} }") == " {a {b {c}}} "
    assert last_boxed("stray } { \\boxed{1} }") == "1"
    assert last_boxed("\\boxed{\\{1\\}}") == "\\{1\\}"
    assert last_boxed("\\boxed {7}") == "7"


def test_an_answer_in_a_tool_call_or_a_tool_output_is_not_the_models() -> None:
    called = '<tool_call>\n{"code": "print(\'\\boxed{34}\')"}\n</tool_call>'
    shown = "<tool_response>\n\\boxed{34}\n</tool_response>"
    assert not compute_score(called + shown + "I do not know.", "34")["acc"]
    assert compute_score(called + shown + boxed("34"), "34")["acc"]
    assert compute_score("A <tool_call> is not needed. " + boxed("34"), "34")["acc"]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "text",
    [
        "\\boxed{" * 15_000,
        "{" * 100_000,
        "\\boxed{" + "(" * 100_000 + "}",
        "\\boxed{" + "\\text{" * 15_000 + "}" * 15_001,
        "\\boxed{" + "(" * 999 + "1" + ")" * 999 + "}",
        "\\boxed{" + "\\{" * 450 + "1" + "\\}" * 450 + "}",
        "\\boxed{" + "0" * 100_000 + "}",
        "\\boxed{" + "1," * 50_000 + "}",
        "\\boxed{" + " " * 100_000 + "x}",
        "\\boxed{" + "a " * 50_000 + "}",
        "\\boxed{" + "\\frac" * 20_000 + "}",
        "<tool_call>" * 10_000,
    ],
)
def test_degenerate_text_takes_no_time(text: str) -> None:
    assert not compute_score(text, "34")["acc"]
    assert not compute_score(text, "34", "math_verify")["acc"]


@pytest.mark.parametrize(
    ("truth", "answer", "same"),
    [
        ("20\\%", "0.2", True), ("20\\%", "20", True), ("20", "20\\%", True), ("20\\%", "20.0\\%", True),
        ("20\\%", "0.2\\%", False), ("1\\%", "100\\%", False), ("[10\\%,20\\%]", "[0.1\\%,0.2\\%]", False),
        ("\\{1,2\\},\\{3,4\\}", "\\{4,3\\},\\{2,1\\}", True), ("\\{1,2\\},\\{3,4\\}", "\\{1,3\\},\\{2,4\\}", False),
        ("\\{\\{1,2\\},\\{3,4\\}\\}", "\\{1,2,3,4\\}", False), ("1, \\pm 2", "-2,1,2", True),
        ("a_1", "a_1", True), ("a_1", "a", False), ("b_{10}", "b", False), ("F_2", "F", False),
        ("1011_2", "1011", True), ("1011_2", "1011_{2}", True), ("1011_2", "1011_3", False),
    ],
)  # fmt: skip
@pytest.mark.timeout(180)
def test_percentages_partitions_and_indices(truth: str, answer: str, same: bool) -> None:
    assert compute_score(boxed(answer), truth, "math_verify")["acc"] is same


@pytest.mark.timeout(180)
def test_votes_do_not_depend_on_the_order_in_which_answers_came() -> None:
    """Of nine answers without a number, and one in two spellings, each is compared with each."""
    answers = [*(f"x+{n}" for n in range(2, 11)), "x+1", "1+x"]
    for order in (answers, answers[::-1]):
        kinds = _votes(order, "math_verify")
        assert len(set(kinds)) == 10 and kinds[order.index("x+1")] == kinds[order.index("1+x")]


@pytest.mark.timeout(180)
def test_math_verify_judges_by_value_from_any_thread() -> None:
    cases = [
        ("\\text{13}", "13", True),
        ("\\frac{2}{4}", "\\frac{1}{2}", True),
        ("0.5", "\\frac{1}{2}", True),
        ("(x+1)^2", "x^2+2x+1", True),
        ("\\sqrt{\\frac{1}{n}}", "\\frac{1}{\\sqrt{n}}", True),
        ("2x+2y=4", "x+y=2", True),
        ("x+y=3", "x+y=2", False),
        ("\\frac{1}{3}", "\\frac{1}{2}", False),
        ("\\frac{{{", "1", False),
    ]
    assert threading.current_thread() is threading.main_thread()
    with ThreadPoolExecutor(3) as pool:
        scores = list(pool.map(lambda case: compute_score(boxed(case[0]), case[1], "math_verify"), cases))
    assert [(answer, score["acc"]) for (answer, _, _), score in zip(cases, scores, strict=True)] == [
        (answer, expected) for answer, _, expected in cases
    ]
    answer, truth, expected = cases[1]
    assert compute_score(boxed(answer), truth, "math_verify")["acc"] is expected


@pytest.mark.timeout(180)
def test_a_comparison_that_hangs_is_stopped_and_the_next_is_right() -> None:
    verifier = symbolic.MathVerifier(workers=1, timeout=5.0)
    try:
        assert verifier.compare("\\frac{1}{2}", "0.5") is True
        hung, quick = ThreadPoolExecutor(1), ThreadPoolExecutor(4)
        slow = hung.submit(verifier.compare, "3", "9^{9^{9^{9}}}")
        # Their wait for the only worker is longer than the time limit of one comparison.
        others = [quick.submit(verifier.compare, "\\frac{1}{2}", "0.5") for _ in range(4)]
        assert slow.result() is None
        assert [other.result() for other in others] == [True] * 4
    finally:
        verifier.close()


def test_a_worker_that_cannot_start_is_an_outage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(symbolic.sys, "executable", "/does/not/exist")
    with pytest.raises(RewardError, match="cannot start"):
        symbolic.MathVerifier(workers=1).compare("1", "2")
    monkeypatch.setattr(symbolic.sys, "executable", "/bin/false")
    with pytest.raises(RewardError, match="pip install math-verify"):
        symbolic.MathVerifier(workers=1).compare("1", "2")


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ConfigError, match="dapo, math_verify, got 'exact'"):
        compute_score("", "", "exact")


def test_shaping_rewards_tool_use_in_wrong_answers_only() -> None:
    # (n - 2) / 2 * 0.1 for n messages, capped at -0.6.
    expected = {2: -1.0, 4: -0.9, 6: -0.8, 8: -0.7, 10: -0.6, 12: -0.6, 40: -0.6}
    assert {n: pytest.approx(shape_tool_use(-1.0, n)) for n in expected} == expected
    assert shape_tool_use(1.0, 40) == 1.0


@pytest.mark.parametrize(
    ("turns", "calls", "messages"),
    [(1, 0, 2), (2, 1, 4), (2, 5, 4), (3, 0, 2), (3, 2, 6), (4, 2, 6), (0, 0, 2)],
)
def test_messages_count_rounds_with_an_executed_call(turns: int, calls: int, messages: int) -> None:
    sample = Sample(prompt="", num_turns=turns, num_tool_calls=calls)
    assert conversation_messages(sample) == messages
    assert conversation_messages(sample, "calls") == 2 + 2 * calls and conversation_messages(sample, "none") == 2


def test_the_default_reward_follows_rm_type() -> None:
    sample = Sample(prompt="", label="1000", response=boxed("1000"))
    assert asyncio.run(default_reward(Config(rm_type="dapo"), sample))["score"] == 1.0
    sample.response = boxed("\\frac{2000}{2}")
    assert asyncio.run(default_reward(Config(rm_type="dapo"), sample))["score"] == -1.0
    assert asyncio.run(default_reward(Config(rm_type="math_verify"), sample))["score"] == 1.0
    with pytest.raises(ConfigError, match="--label-key"):
        asyncio.run(default_reward(Config(), Sample(prompt="")))


def test_a_box_in_a_thought_that_the_prompt_opened_and_nothing_closed_is_no_answer() -> None:
    sample = Sample(prompt="", label="34", response="So " + boxed("34"), begins_in_thought=True)
    config = Config(rm_type="math_verify")
    assert asyncio.run(default_reward(config, sample))["acc"] is False and format_score(sample.scored_text) == 0.0
    sample.response += "</think>\n" + boxed("34")
    assert asyncio.run(default_reward(config, sample))["acc"] is True


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("It is \\boxed{34}.", 1.0),
        ("<tool_call>{}</tool_call>\n<tool_response>1</tool_response>\nAnswer: \\boxed{1}", 1.0),
        ("<code>1</code><interpreter>1</interpreter><answer>\\boxed{1}</answer>", 1.0),
        ("It is 34.", 0.0),
        ("\\boxed{1} or \\boxed{2}", 0.0),
        ("\\boxed{1}" + "x" * 300, 0.0),
        ("\\boxed{1", 0.0),
        ("<think>It is \\boxed{1}.", 0.0),
        ("<think>Hm.</think>It is \\boxed{1}.", 1.0),
        ("<tool_call>{} \\boxed{1}", 0.0),
        ("\\boxed{1} <tool_call>{}</tool_call>\n<tool_response>1</tool_response>", 0.0),
    ],
)
def test_the_format_asks_for_one_box_behind_the_last_output_and_paired_tags(response: str, score: float) -> None:
    assert format_score(response) == score


def run(function: Callable[..., Any], labels: list[str], timeout: float | None = 60.0) -> list[Any]:
    """What a runner gives for samples of these labels, with errors as values."""

    async def main() -> list[Any]:
        runner = RewardRunner(function, "f", timeout=timeout)
        samples = [Sample(prompt="", label=label) for label in labels]
        return await asyncio.gather(*(runner(Config(), sample) for sample in samples), return_exceptions=True)

    return asyncio.run(main())


async def async_reward(args: Config, sample: Sample, **kwargs: Any) -> float:
    if sample.label == "stuck":
        await asyncio.sleep(3600)
    return float(sample.label or "")


def plain_reward(args: Config, sample: Sample) -> float:
    if sample.label == "stuck":
        threading.Event().wait(30)  # its thread is left behind
    return float(sample.label or "")


@pytest.mark.parametrize("function", [async_reward, plain_reward])
def test_a_stuck_or_crashing_reward_costs_one_sample(function: Callable[..., Any]) -> None:
    first, stuck, crashed, last = run(function, ["1", "stuck", "x", "2"], timeout=3.0)
    assert (first, last) == (1.0, 2.0)
    assert isinstance(stuck, RewardError) and "longer than --reward-timeout 3 s" in str(stuck)
    assert isinstance(crashed, RewardError) and "f raised ValueError: could not convert" in str(crashed)


def test_a_timeout_of_the_functions_own_is_not_blamed_on_the_limit() -> None:
    async def judged(args: Config, sample: Sample) -> float:
        return await asyncio.wait_for(asyncio.sleep(60, 1.0), 0.01)

    (error,) = run(judged, ["1"])
    assert isinstance(error, RewardError) and "f raised TimeoutError" in str(error)


def test_an_overrun_that_ignores_its_cancellation_is_not_waited_for() -> None:
    async def main() -> None:
        released = asyncio.Event()

        async def stubborn(args: Config, sample: Sample) -> float:
            while not released.is_set():
                try:
                    await released.wait()
                except asyncio.CancelledError:
                    pass
            return 1.0

        runner = RewardRunner(stubborn, "f", timeout=0.1)
        call = asyncio.ensure_future(runner(Config(), Sample(prompt="")))
        await asyncio.wait({call}, timeout=10)
        ended = call.done()
        released.set()
        assert ended
        with pytest.raises(RewardError, match="longer than --reward-timeout"):
            await call

    asyncio.run(main())


def test_waiting_for_a_thread_is_not_counted_as_run_time() -> None:
    def slow(args: Config, sample: Sample) -> float:
        time.sleep(0.1)
        return 1.0

    # One after the other they take several times the limit of one.
    count = 40 * THREADS
    assert run(slow, ["1"] * count, timeout=3.0) == [1.0] * count


def test_a_mistake_of_the_user_and_a_cancellation_pass_through() -> None:
    def misused(args: Config, sample: Sample) -> float:
        raise ConfigError("check --label-key")

    assert isinstance(run(misused, ["1"])[0], ConfigError)

    async def cancelled() -> None:
        task = asyncio.create_task(RewardRunner(async_reward, "f", timeout=60)(Config(), Sample("", label="stuck")))
        await asyncio.sleep(0)
        task.cancel()
        await task

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(cancelled())


@pytest.mark.timeout(180)
def test_after_one_comparison_that_overruns_the_score_is_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    verifier = symbolic.MathVerifier(workers=1, timeout=1.0)
    monkeypatch.setattr("slime_retool.reward.score.shared_verifier", lambda: verifier)
    tower = ",".join(f"9^{{9^{{9^{{{i}}}}}}}" for i in range(10, 30))
    asked: list[bool | None] = []
    compare = verifier.compare
    monkeypatch.setattr(verifier, "compare", lambda a, b: asked.append(compare(a, b)) or asked[-1])
    try:
        assert not compute_score(boxed(tower), tower.replace("9^", "8^"), "math_verify")["acc"]
        assert asked.count(None) == 1 and asked[-1] is None
    finally:
        verifier.close()
