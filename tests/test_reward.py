r"""Scores: what counts as the answer, when two answers are equal, and that no text can stall the scorer."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from slime_retool.config import Config
from slime_retool.errors import ConfigError, RewardError
from slime_retool.reward import compute_score, conversation_messages, default_reward, shape_tool_use, symbolic
from slime_retool.reward.boxed import last_boxed
from slime_retool.types import Sample


def boxed(answer: str) -> str:
    return f"So we get \\boxed{{{answer}}}."


EQUAL = [
    ("34", "34"),
    (" 34 ", "34"),
    ("034", "34"),
    ("34", "034"),
    ("34.0", "34"),
    ("+34", "34"),
    ("-0", "0"),
    ("-3.50", "-3.5"),
    ("1,000", "1000"),
    ("1{,}234{,}567", "1234567"),
    ("1\\,000", "1000"),
    ("\\text{34}", "34"),
    ("\\textbf{34}", "34"),
    ("\\mathrm{\\text{34}}", "34"),
    ("$34$", "34"),
    ("\\$34", "34"),
    ("34.", "34"),
    ("34\\%", "34"),
    ("34^\\circ", "34"),
    ("34^{\\circ}", "34"),
    ("34\\text{ cm}", "34"),
    ("34\\text{ cm}^2", "34"),
    ("34 degrees", "34"),
    ("x = 34", "34"),
    ("\\boxed{34}", "34"),
    ("\\frac12", "\\frac{1}{2}"),
    ("\\dfrac{1}{2}", "\\frac{1}{2}"),
    ("\\sqrt2", "\\sqrt{2}"),
    ("\\left( 1, 2 \\right)", "(1,2)"),
    ("\\text{(B)}", "(B)"),
    ("\\{1,\\{2,\\frac{1}{\\sqrt{2}}\\}\\}", "\\{1,\\{2,\\frac{1}{\\sqrt{2}}\\}\\}"),
]


@pytest.mark.parametrize(("answer", "truth"), EQUAL)
def test_equal_answers_score_one(answer: str, truth: str) -> None:
    assert compute_score(boxed(answer), truth) == {"score": 1.0, "acc": True, "pred": answer.strip()}


@pytest.mark.parametrize(
    ("answer", "truth"), [("35", "34"), ("340", "34"), ("3.4", "34"), ("-34", "34"), ("1,00", "100"), ("", "")]
)
def test_other_answers_score_minus_one(answer: str, truth: str) -> None:
    assert compute_score(boxed(answer), truth) == {"score": -1.0, "acc": False, "pred": answer}


def test_prose_after_the_box_does_not_matter() -> None:
    assert compute_score(boxed("34") + " That is all." * 100, "34")["acc"]


def test_without_a_box_there_is_no_answer() -> None:
    assert compute_score("The answer is 34.", "34") == {"score": -1.0, "acc": False, "pred": ""}


def test_the_last_complete_box_counts() -> None:
    assert compute_score(boxed("1") + boxed("2"), "2")["acc"]
    assert compute_score(boxed("34") + "\\boxed{35", "34")["acc"]
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


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "text",
    [
        "\\boxed{" * 15_000,
        "{" * 100_000,
        "\\boxed{" + "(" * 100_000 + "}",
        "\\boxed{" + "\\text{" * 15_000 + "}" * 15_001,
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
        assert verifier.equal("\\frac{1}{2}", "0.5") is True
        hung, quick = ThreadPoolExecutor(1), ThreadPoolExecutor(4)
        slow = hung.submit(verifier.equal, "3", "9^{9^{9^{9}}}")
        # Their wait for the only worker is longer than the time limit of one comparison.
        others = [quick.submit(verifier.equal, "\\frac{1}{2}", "0.5") for _ in range(4)]
        assert slow.result() is False
        assert [other.result() for other in others] == [True] * 4
    finally:
        verifier.close()


def test_a_worker_that_cannot_start_is_an_outage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(symbolic.sys, "executable", "/does/not/exist")
    with pytest.raises(RewardError, match="cannot start"):
        symbolic.MathVerifier(workers=1).equal("1", "2")
    monkeypatch.setattr(symbolic.sys, "executable", "/bin/false")
    with pytest.raises(RewardError, match="pip install math-verify"):
        symbolic.MathVerifier(workers=1).equal("1", "2")


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
    assert conversation_messages(Sample(prompt="", num_turns=turns, num_tool_calls=calls)) == messages


def test_the_default_reward_follows_rm_type() -> None:
    sample = Sample(prompt="", label="1000", response=boxed("1,000"))
    assert asyncio.run(default_reward(Config(rm_type="dapo"), sample))["score"] == 1.0
    sample.response = boxed("\\frac{2000}{2}")
    assert asyncio.run(default_reward(Config(rm_type="dapo"), sample))["score"] == -1.0
    assert asyncio.run(default_reward(Config(rm_type="math_verify"), sample))["score"] == 1.0
    with pytest.raises(ConfigError, match="--label-key"):
        asyncio.run(default_reward(Config(), Sample(prompt="")))
