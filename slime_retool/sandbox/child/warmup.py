"""Typical numpy and sympy work, done in the zygote: a first `solve` costs tens of milliseconds, a later one two.

Only packages that are there are warmed. Nothing here affects results: sympy's caches are keyed by value.
"""

from __future__ import annotations

import contextlib

STDLIB = (
    "__future__ ast bisect cmath collections copy csv dataclasses datetime decimal enum fractions functools heapq io "
    "itertools json math numbers operator random re statistics string textwrap threading time traceback typing warnings"
).split()

_NUMPY = """
import numpy as np
a = np.array([[2.0, 1.0], [1.0, 3.0]])
str(np.linalg.solve(a, np.ones(2)))
np.linalg.eigh(a)
np.linalg.inv(a) @ a
np.roots([1, -3, 2])
np.random.default_rng(0).normal(size=3)
repr(a.sum(axis=0))
np.linspace(0, 1, 5).cumsum()
np.isclose(np.sort(a), a).all()
"""

_SYMPY = """
from sympy import *
x, y = symbols("x y")
k = symbols("k", integer=True, positive=True)
f = Function("f")

simplify((x**2 - n * n) / (x - n))
simplify(sqrt(8 * n) + sqrt(2 * n))
trigsimp(sin(x) ** 2 + cos(x) ** 2 * n)
factor(x**4 - n**4)
expand((x + n * y) ** 3)
apart(1 / (x**2 - n * n), x)
nsimplify(0.125 * n)
radsimp(1 / (sqrt(n) + 1))
Poly(x**3 - n * x, x).all_coeffs()
sympify(f"{n}*x + y/2")
lambdify(x, x**2 + n)(3)
(x**2 + y).subs({x: n, y: pi})
Rational(22, 7 * n).evalf(8)
sqrt(50 * n).evalf(20)
Point(0, 0).distance(Point(n, 4))

solve(x**2 - (n + 5) * x + 5 * n)  # two rational roots
solve(x**2 - n * x - 1)  # irrational ones
solve(x**2 + x + n)  # complex ones
solve(2 * x**2 - Rational(n, 3))
solve(n * x - 7)
solve(x**3 - n * n * x)
solve(sqrt(x + n) - 3)
solve(Eq(n**x, n**3))
solve(sin(x) - Rational(1, n))
solve(x**2 - 0.5 * n)
solve(k**2 - n * n)
solve([2 * x + y - n, x - y - 1], [x, y])
solve([x + y - 2 * n, x * y - n * n + 1], [x, y], dict=True)
solve(x**2 < n * n, x)
solveset(cos(x), x, S.Reals)
nsolve(x**3 - n, 1)
diophantine(2 * x + 3 * y - n)
rsolve(f(k) - n * f(k - 1), f(k))

factorint(2310 * n)
isprime(10007 + n)
list(primerange(2, 30 * n))
divisors(84 * n)
totient(90 * n)
gcd(84, 30 * n)
lcm(84, 30 * n)
mod_inverse(7, 10 * n + 3)
binomial(12, n)
factorial(10 * n)
primepi(100 * n)
nextprime(1000 * n)

Matrix([[n, 1], [1, 3]]).inv()
Matrix([[n, 1], [1, 3]]).det()
Matrix([[n, 1], [1, 3]]).eigenvals()
Matrix([[1, n], [2, 2 * n]]).rref()
latex(x**2 / (y + n))
str(sin(x) / (n * y) + sqrt(n))
repr(Rational(n, 7))
"""

_CALCULUS = """
from sympy import *
x, m, k = symbols("x m k")
diff(exp(x) * log(x), x)
integrate(x * cos(x), x)
integrate(x**2, (x, 0, 3))
integrate(exp(-(x**2)), (x, -oo, oo))
limit((1 + 1 / x) ** x, x, oo)
series(cos(x), x, 0, 6)
summation(k * (k + 1), (k, 1, m))
Sum(k**2, (k, 1, 20)).doit()
"""


def warm(names: list[str]) -> None:
    """Do the work that suits these packages; with another version some lines may fail, and only cost time later.

    sympy's with two numbers, so that the interpreter has specialised the bytecode and sympy has been through its
    branches (rational, irrational and complex roots, say), not only through its caches.
    """
    for package, numbers, text in (("numpy", (0,), _NUMPY), ("sympy", (2, 3), _SYMPY), ("sympy", (0,), _CALCULUS)):
        for number in numbers if package in names else ():
            namespace = {"n": number}
            for line in text.splitlines():
                with contextlib.suppress(Exception):
                    exec(line, namespace)
