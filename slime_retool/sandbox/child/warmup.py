"""Typical numpy and sympy work, done in the zygote: a first `solve` costs tens of milliseconds, a later one two.

Each kind of work is done with several numbers, so that the interpreter has specialised the bytecode and sympy has been
through its branches (rational, irrational and complex roots, say), not only through its caches. Only packages that are
there are warmed. Nothing here affects results: sympy's caches are keyed by value.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable

STDLIB = (
    "__future__ ast bisect cmath collections copy csv dataclasses datetime decimal enum fractions functools heapq io "
    "itertools json math numbers operator random re statistics string textwrap threading time traceback typing warnings"
).split()


def preload(names: list[str]) -> None:
    for name in names:
        importlib.import_module(name)


def warm(names: list[str]) -> None:
    """Do the work that suits these packages; with another version some may fail, and only costs time later."""
    jobs: list[Callable[[], None]] = []
    if "numpy" in names:
        jobs.append(_numpy)
    if "sympy" in names:
        kinds = (_expressions, _equations, _number_theory, _matrices_and_printing)
        jobs += [functools.partial(kind, number) for number in _NUMBERS for kind in kinds]
        jobs.append(_calculus)
    for job in jobs:
        with contextlib.suppress(Exception):
            job()


_NUMBERS = (2, 3)


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


def _equations(n: int) -> None:
    import sympy as sp

    x, y = sp.symbols("x y")
    whole = sp.symbols("k", integer=True, positive=True)
    for equation in (
        x**2 - (n + 5) * x + 5 * n,  # two rational roots
        x**2 - n * x - 1,  # irrational ones
        x**2 + x + n,  # complex ones
        2 * x**2 - sp.Rational(n, 3),
        n * x - 7,
        x**3 - n * n * x,
        sp.sqrt(x + n) - 3,
        sp.Eq(n**x, n**3),
        sp.sin(x) - sp.Rational(1, n),
        x**2 - 0.5 * n,
        whole**2 - n * n,
    ):
        sp.solve(equation)
    sp.solve([2 * x + y - n, x - y - 1], [x, y])
    sp.solve([x + y - 2 * n, x * y - n * n + 1], [x, y], dict=True)
    sp.solve(x**2 < n * n, x)
    sp.solveset(sp.cos(x), x, sp.S.Reals)
    sp.nsolve(x**3 - n, 1)
    sp.diophantine(2 * x + 3 * y - n)
    f = sp.Function("f")
    sp.rsolve(f(whole) - n * f(whole - 1), f(whole))


def _expressions(n: int) -> None:
    import sympy as sp

    x, y = sp.symbols("x y")
    sp.simplify((x**2 - n * n) / (x - n))
    sp.simplify(sp.sqrt(8 * n) + sp.sqrt(2 * n))
    sp.trigsimp(sp.sin(x) ** 2 + sp.cos(x) ** 2 * n)
    sp.factor(x**4 - n**4)
    sp.expand((x + n * y) ** 3)
    sp.apart(1 / (x**2 - n * n), x)
    sp.nsimplify(0.125 * n)
    sp.radsimp(1 / (sp.sqrt(n) + 1))
    sp.Poly(x**3 - n * x, x).all_coeffs()
    sp.sympify(f"{n}*x + y/2")
    sp.lambdify(x, x**2 + n)(3)
    (x**2 + y).subs({x: n, y: sp.pi})
    sp.Rational(22, 7 * n).evalf(8)
    sp.sqrt(50 * n).evalf(20)
    sp.Point(0, 0).distance(sp.Point(n, 4))


def _calculus() -> None:
    import sympy as sp

    x, m, k = sp.symbols("x m k")
    sp.diff(sp.exp(x) * sp.log(x), x)
    sp.integrate(x * sp.cos(x), x)
    sp.integrate(x**2, (x, 0, 3))
    sp.integrate(sp.exp(-(x**2)), (x, -sp.oo, sp.oo))
    sp.limit((1 + 1 / x) ** x, x, sp.oo)
    sp.series(sp.cos(x), x, 0, 6)
    sp.summation(k * (k + 1), (k, 1, m))
    sp.Sum(k**2, (k, 1, 20)).doit()


def _number_theory(n: int) -> None:
    import sympy as sp

    sp.factorint(2310 * n)
    sp.isprime(10007 + n)
    list(sp.primerange(2, 30 * n))
    sp.divisors(84 * n)
    sp.totient(90 * n)
    sp.gcd(84, 30 * n)
    sp.lcm(84, 30 * n)
    sp.mod_inverse(7, 10 * n + 3)
    sp.binomial(12, n)
    sp.factorial(10 * n)
    sp.primepi(100 * n)
    sp.nextprime(1000 * n)


def _matrices_and_printing(n: int) -> None:
    import sympy as sp

    x, y = sp.symbols("x y")
    matrix = sp.Matrix([[n, 1], [1, 3]])
    matrix.inv()
    matrix.det()
    matrix.eigenvals()
    sp.Matrix([[1, n], [2, 2 * n]]).rref()
    sp.latex(x**2 / (y + n))
    str(sp.sin(x) / (n * y) + sp.sqrt(n))
    repr(sp.Rational(n, 7))
