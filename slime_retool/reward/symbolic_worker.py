"""Compares pairs of answers: (ground truth, answer) in by a pipe, b"1" for equal or b"0" out. Ends with the pipe."""

from __future__ import annotations

import math
import resource
import signal
import sys
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

MEMORY = 4 << 30
CLOSE = 1e-12
"""Rational numbers are equal exactly, others within this share of the larger one, found with 30 digits."""


def main() -> None:
    # Python puts this file's folder first, where `math_verify.py` would hide the library of that name.
    del sys.path[0]
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import parse
    from math_verify.parser import LatexExtractionConfig

    # The library would drop any letter behind a number as a unit.
    latex = [LatexExtractionConfig(normalization_config=NormalizationConfig(malformed_operators=True, nits=True))]

    def equal(pair: tuple[str, str]) -> bool:
        # No time limit of the library's own: it needs signals.
        gold, target = (parse(f"${text}$", latex, parsing_timeout=None) for text in pair)
        return any(same(a, b) for a in gold for b in target)

    seconds, pipe = float(sys.argv[1]), Connection(int(sys.argv[2]))
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY if hard < 0 else min(MEMORY, hard), hard))
    # By default this signal kills, native code included: no worker outlives its comparison, even without a parent.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    equal(("x + 1/2", "x + 0.5"))  # a first comparison imports much, which is none of its time
    pipe.send_bytes(b"1")
    with suppress(EOFError):
        while True:
            pair = pipe.recv()
            signal.alarm(math.ceil(seconds) + 2)
            answer = b"0"
            with suppress(Exception):
                answer = b"1" if equal(pair) else b"0"
            signal.alarm(0)
            pipe.send_bytes(answer)


def same(a: Any, b: Any) -> bool:
    """Equality of what sympy holds; variables are taken to be positive, so that roots can be told to agree."""
    import sympy
    from math_verify import verify

    equations = isinstance(a, sympy.Eq) and isinstance(b, sympy.Eq)
    if not equations and not isinstance(a, sympy.Expr) and not isinstance(b, sympy.Expr):
        return bool(verify(a, b, timeout_seconds=None))
    # |x| is not x: what stands in an absolute value is negative, too.
    magnitudes = {s.name for side in (a, b) for each in side.atoms(sympy.Abs) for s in each.free_symbols}
    same_where = same_equation if equations else same_value
    return all(same_where(signed(a, negative), signed(b, negative)) for negative in ("", *sorted(magnitudes)))


def same_equation(a: Any, b: Any) -> bool:
    """Whether they are one line in two forms."""
    import sympy

    ratio = sympy.simplify((a.lhs - a.rhs) / (b.lhs - b.rhs))
    return bool(ratio.is_number and ratio.is_finite and ratio != 0)


def same_value(a: Any, b: Any) -> bool:
    import sympy

    if a.is_rational and b.is_rational:
        return bool((a - b).doit() == 0)
    if (a - b).free_symbols:
        decimals = {each: sympy.Rational(str(each)) for each in (a - b).atoms(sympy.Float)}  # x^0.5 as the root of x
        return bool(sympy.simplify((a - b).subs(decimals)) == 0)
    difference = sympy.N(a - b, 30)
    return bool(a == b or (difference.is_finite and abs(difference) <= CLOSE * abs(sympy.N(a, 30))))


def signed(expression: Any, negative: str) -> Any:
    """With positive variables, but for the one of the name `negative`."""
    import sympy

    values = {s: sympy.Symbol(s.name, positive=True) for s in expression.free_symbols}
    return expression.subs({s: -value if s.name == negative else value for s, value in values.items()})


if __name__ == "__main__":
    main()
