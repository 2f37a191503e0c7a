"""Compares pairs of answers: JSON lines `[ground_truth, answer]` in, `true` or `false` out. Ends with its input."""

from __future__ import annotations

import json
import math
import resource
import signal
import sys

MEMORY = 4 << 30


def main() -> None:
    # Python puts this file's folder first, where `math_verify.py` would hide the library of that name.
    del sys.path[0]
    from math_verify import parse, verify
    from math_verify.parser import LatexExtractionConfig

    latex = [LatexExtractionConfig()]

    seconds = float(sys.argv[1])
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY if hard < 0 else min(MEMORY, hard), hard))
    # By default this signal kills, native code included: no worker outlives its comparison, even without a parent.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    print("ready", flush=True)
    for line in sys.stdin:
        ground_truth, answer = json.loads(line)
        signal.alarm(math.ceil(seconds) + 2)
        try:
            # No time limits of the library's own: they need signals.
            gold = parse(f"${ground_truth}$", latex, parsing_timeout=None)
            target = parse(f"${answer}$", latex, parsing_timeout=None)
            same = bool(verify(gold, target, timeout_seconds=None)) or same_for_positive(gold, target)
        except Exception:
            same = False
        signal.alarm(0)
        print(json.dumps(same), flush=True)


def same_for_positive(gold: list, target: list) -> bool:
    """Equalities that the library misses: roots that agree for positive variables, one line in two forms."""
    import sympy

    for a in gold:
        for b in target:
            if isinstance(a, sympy.Eq) and isinstance(b, sympy.Eq):
                a, b = (positive(side.lhs - side.rhs) for side in (a, b))
                ratio = sympy.simplify(a / b) if b != 0 else sympy.nan
                if ratio.is_number and ratio.is_finite and ratio != 0:
                    return True
            elif isinstance(a, sympy.Expr) and isinstance(b, sympy.Expr) and a.free_symbols:
                if sympy.simplify(positive(a) - positive(b)) == 0:
                    return True
    return False


def positive(expression):
    import sympy

    return expression.subs({s: sympy.Symbol(s.name, positive=True) for s in expression.free_symbols})


if __name__ == "__main__":
    main()
