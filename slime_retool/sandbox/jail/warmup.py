"""Typical numpy and sympy work, done once in the zygote: a first `solve` costs tens of milliseconds, a later
one two.

Only packages that are there are warmed. Nothing here affects results: sympy's caches are keyed by value.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

STDLIB = (
    "__future__ ast bisect cmath collections copy csv dataclasses datetime decimal enum fractions "
    "functools heapq io itertools json "
    "math numbers operator random re statistics string textwrap threading time traceback typing warnings"
).split()


def preload(names: list[str]) -> None:
    for name in names:
        importlib.import_module(name)


def warm(names: list[str]) -> None:
    if "numpy" in names:
        _numpy()
    if "sympy" in names:
        _sympy()


def _numpy() -> None:
    import numpy as np

    a = np.array([[2.0, 1.0], [1.0, 3.0]])
    for job in (
        lambda: str(np.linalg.solve(a, np.ones(2))),
        lambda: np.linalg.eigh(a),
        lambda: np.linalg.inv(a) @ a,
        lambda: np.roots([1, -3, 2]),
        lambda: np.random.default_rng(0).normal(size=3),
        lambda: repr(a.sum(axis=0)),
        lambda: np.linspace(0, 1, 5).cumsum(),
        lambda: np.isclose(np.sort(a), a).all(),
    ):
        job()


def _sympy() -> None:
    import sympy as sp

    x, y, n, k = sp.symbols("x y n k")
    jobs: list[Callable[[], object]] = [
        lambda: sp.solve(x**2 - 7 * x + 10, x),
        lambda: sp.solve([2 * x + y - 5, x - y - 1], [x, y]),
        lambda: sp.solve([x + y - 10, x * y - 21], [x, y]),
        lambda: sp.solveset(sp.cos(x), x, sp.S.Reals),
        lambda: sp.solve(x**3 - x, x),
        lambda: sp.solve(sp.sqrt(x + 1) - 3, x),
        lambda: sp.solve(sp.Eq(2**x, 8), x),
        lambda: sp.solve(x**2 < 4, x),
        lambda: sp.simplify((x**2 - 1) / (x - 1)),
        lambda: sp.trigsimp(sp.sin(x) ** 2),
        lambda: sp.factor(x**4 - 16),
        lambda: sp.expand((x + 2 * y) ** 3),
        lambda: sp.apart(1 / (x**2 - 1), x),
        lambda: sp.diff(sp.exp(x) * sp.log(x), x),
        lambda: sp.integrate(x * sp.cos(x), x),
        lambda: sp.integrate(sp.exp(-(x**2)), (x, -sp.oo, sp.oo)),
        lambda: sp.limit((1 + 1 / x) ** x, x, sp.oo),
        lambda: sp.series(sp.cos(x), x, 0, 6),
        lambda: sp.summation(k * (k + 1), (k, 1, n)),
        lambda: sp.sqrt(50).evalf(20),
        lambda: sp.Matrix([[2, 1], [1, 3]]).inv(),
        lambda: sp.Matrix([[2, 0], [1, 3]]).eigenvals(),
        lambda: sp.Matrix([[1, 2], [2, 4]]).rref(),
        lambda: sp.factorint(2310),
        lambda: sp.isprime(10007),
        lambda: list(sp.primerange(2, 60)),
        lambda: sp.divisors(84),
        lambda: sp.totient(90),
        lambda: sp.gcd(84, 30),
        lambda: sp.mod_inverse(7, 40),
        lambda: sp.binomial(12, 5),
        lambda: sp.nsimplify(0.125),
        lambda: sp.nsolve(x**3 - 2, 1),
        lambda: sp.Poly(x**3 - 2 * x, x).all_coeffs(),
        lambda: sp.latex(x**2 / (y + 1)),
        lambda: str(sp.sin(x) / y),
        lambda: sp.lambdify(x, x**2 + 1)(3),
        lambda: sp.sympify("3*x + y/2"),
        lambda: sp.Rational(22, 7).evalf(8),
        lambda: sp.Sum(k**2, (k, 1, 20)).doit(),
        lambda: sp.diophantine(2 * x + 3 * y - 7),
        lambda: sp.Point(0, 0).distance(sp.Point(3, 4)),
        lambda: (x**2 + y).subs({x: 2, y: sp.pi}),
        lambda: sp.rsolve(sp.Function("f")(n) - 2 * sp.Function("f")(n - 1), sp.Function("f")(n)),
    ]
    for job in jobs:
        job()
