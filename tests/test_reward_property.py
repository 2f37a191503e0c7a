"""Random answers: another spelling of a value is right, a value next to it is wrong."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime_retool.reward import compute_score

EXAMPLES = 40
"""Each draws several comparisons, some by the math library in a process of its own."""


def right(answer: str, truth: str) -> bool:
    return compute_score(f"So it is \\boxed{{{answer}}}.", truth, "math_verify")["acc"]


def check(truth: str, respelled: list[str], near: list[str]) -> None:
    assert [answer for answer in [truth, *respelled] if not right(answer, truth)] == [], truth
    assert [answer for answer in near if right(answer, truth)] == [], truth


def tex(value: Fraction) -> str:
    if value.denominator == 1:
        return str(value.numerator)
    return f"{'-' if value < 0 else ''}\\frac{{{abs(value.numerator)}}}{{{value.denominator}}}"


letters = st.lists(st.sampled_from("abcknprtuvwxyz"), min_size=2, max_size=3, unique=True)
rationals = st.fractions(-(10**6), 10**6, max_denominator=997)
flipped = {"<": ">", "\\le": "\\ge", ">": "<", "\\ge": "\\le"}
python = {"<": "<", "\\le": "<=", ">": ">", "\\ge": ">="}
sympy_name = {"[]": "Interval", "()": "Interval.open", "(]": "Interval.Lopen", "[)": "Interval.Ropen"}
squarefree = st.sampled_from([2, 3, 5, 6, 7, 10, 11, 13, 14, 15, 17, 19, 21, 22, 23])


def runs(*strategies: st.SearchStrategy) -> Callable:
    """`given`, with a bounded number of examples and no deadline: a loaded machine is slow."""
    return lambda test: settings(max_examples=EXAMPLES, deadline=None, database=None, derandomize=True)(
        given(*strategies)(test)
    )


@pytest.mark.timeout(300)
@runs(rationals, st.integers(2, 9))
def test_rationals(value: Fraction, factor: int) -> None:
    top, bottom = value.numerator, value.denominator
    check(
        tex(value),
        [
            f"{top}/{bottom}",
            f"\\dfrac{{{top}}}{{{bottom}}}",
            f"\\frac{{{top * factor}}}{{{bottom * factor}}}",
            f"Fraction({top}, {bottom})",
            f"x = {tex(value)}",
        ],
        [tex(value + Fraction(1, bottom)), tex(value - 1), f"{top + 1}/{bottom}", tex(value * 10 + 1)],
    )


@pytest.mark.timeout(300)
@runs(st.integers(-99, 99), st.integers(1, 40), squarefree)
def test_radicals(whole: int, factor: int, root: int) -> None:
    times = "" if factor == 1 else factor
    truth = f"{whole}+{times}\\sqrt{{{root}}}"
    check(
        truth,
        [
            f"{times}\\sqrt{{{root}}}+{whole}" if whole >= 0 else f"{times}\\sqrt{{{root}}}{whole}",
            f"{whole}+\\sqrt{{{factor * factor * root}}}",
            f"{whole} + {factor}*sqrt({root})",
        ],
        [
            f"{whole}-{times}\\sqrt{{{root}}}",
            f"{whole + 1}+{times}\\sqrt{{{root}}}",
            f"{whole}+{times}\\sqrt{{{root + 1}}}",
            f"{whole}+{factor + 1}\\sqrt{{{root}}}",
        ],
    )


@pytest.mark.timeout(300)
@runs(st.integers(2, 12), st.integers(-60, 60).filter(lambda power: power not in (0, 1)))
def test_powers(base: int, power: int) -> None:
    truth = f"{base}^{{{power}}}"
    value = Fraction(base) ** power
    check(
        truth,
        [tex(value), f"{base}**({power})", f"\\left({base}\\right)^{{{power}}}"],
        [
            f"{base}^{{{power + 1}}}",
            f"{base}^{{{power - 1}}}",
            f"{base + 1}^{{{power}}}",
            tex(value + abs(value) / 10**9),
        ],
    )


@pytest.mark.timeout(300)
@runs(rationals, rationals.filter(lambda width: width > 0), st.sampled_from("(["), st.sampled_from(")]"))
def test_intervals(low: Fraction, width: Fraction, left: str, right_bracket: str) -> None:
    high = low + width
    below, above = ("<" if left == "(" else "\\le"), ("<" if right_bracket == ")" else "\\le")
    truth = f"{left}{tex(low)},{tex(high)}{right_bracket}"
    other = {"(": "[", "[": "(", ")": "]", "]": ")"}
    check(
        truth,
        [
            f"\\left{left}{tex(low)}, {tex(high)}\\right{right_bracket}",
            f"x \\in {left}{low},{high}{right_bracket}",
            f"{tex(low)} {below} x {above} {tex(high)}",
            f"{tex(high)} {flipped[above]} x {flipped[below]} {tex(low)}",
            f"({low} {python[below]} x) & (x {python[above]} {high})",
            f"{sympy_name[left + right_bracket]}({low}, {high})",
        ],
        [
            f"{other[left]}{tex(low)},{tex(high)}{right_bracket}",
            f"{left}{tex(low)},{tex(high)}{other[right_bracket]}",
            f"{left}{tex(low)},{tex(high + 1)}{right_bracket}",
            f"{left}{tex(low - 1)},{tex(high)}{right_bracket}",
            f"{tex(low)} {flipped[above]} x {flipped[below]} {tex(high)}",
            f"{sympy_name[other[left] + right_bracket]}({low}, {high})",
        ],
    )


@pytest.mark.timeout(300)
@runs(rationals, st.sampled_from(["<", "\\le", ">", "\\ge"]))
def test_half_lines(bound: Fraction, sign: str) -> None:
    closed = sign in ("\\le", "\\ge")
    left, right_bracket = ("[", "]") if closed else ("(", ")")
    below = f"(-\\infty,{tex(bound)}{right_bracket}"
    above = f"{left}{tex(bound)},\\infty)"
    truth, wrong = (below, above) if sign in ("<", "\\le") else (above, below)
    other = {"<": "\\le", "\\le": "<", ">": "\\ge", "\\ge": ">"}[sign]
    check(
        f"x {sign} {tex(bound)}",
        [truth, f"{bound} {flipped[sign]} x", f"{tex(bound)} {flipped[sign]} x", f"x {python[sign]} {bound}"],
        [wrong, f"{tex(bound)} {sign} x", f"x {other} {tex(bound)}", f"{bound + 1} {flipped[sign]} x"],
    )


@pytest.mark.timeout(300)
@runs(letters, st.integers(2, 9), st.sampled_from(["upper", "prime", "magnitude", "transpose"]))
def test_letters_that_look_alike_are_not_one(names: list[str], factor: int, way: str) -> None:
    one, *others = names
    other = {"upper": one.upper(), "prime": f"{one}'", "magnitude": f"|{one}|", "transpose": f"{one}^T"}[way]
    rest = "".join(f"+{name}" for name in others)
    check(
        f"{factor}{one}{rest}-{other}",
        [f"{factor}{one}-{other}{rest}", f"-{other}{rest}+{factor}{one}"],
        [f"{factor - 1}{one}{rest}", f"{factor}{other}{rest}-{one}", f"{factor}{one}{rest}-{others[0]}"],
    )
