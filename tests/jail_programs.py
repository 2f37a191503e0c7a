"""Programs of the kind a model writes for generated puzzles, with answers computed here by other means."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from fractions import Fraction
from itertools import permutations

Program = tuple[str, str]


def _arithmetic(r: random.Random) -> Program:
    a, b, c = r.randint(2, 99), r.randint(2, 99), r.randint(2, 9)
    return f"print(eval('{a} * {b} - {c} ** 3'))", str(a * b - c * c * c)


def _quadratic(r: random.Random) -> Program:
    p, q = sorted(r.sample(range(-20, 20), 2))
    code = "from sympy import symbols, solve\nx = symbols('x')\n"
    code += f"print(sorted(solve(x**2 - ({p + q})*x + ({p * q}), x)))"
    return code, f"[{p}, {q}]"


def _linear_system(r: random.Random) -> Program:
    x, y = r.randint(-9, 9), r.randint(-9, 9)
    code = f"import numpy as np\ns = np.linalg.solve([[2, 1], [1, -3]], [{2 * x + y}, {x - 3 * y}])\n"
    return code + "print(*(int(round(v)) for v in s))", f"{x} {y}"


def _primes(r: random.Random) -> Program:
    n = r.randint(50, 400)
    known = sum(all(k % d for d in range(2, math.isqrt(k) + 1)) for k in range(2, n))
    return f"from sympy import primepi\nprint(primepi({n - 1}))", str(known)


def _simplify_fraction(r: random.Random) -> Program:
    a, b = r.randint(2, 500), r.randint(2, 500)
    code = f"import math\ng = math.gcd({a}, {b})\nprint(f'{{{a} // g}}/{{{b} // g}}')"
    value = Fraction(a, b)
    return code, f"{value.numerator}/{value.denominator}"


def _lcm(r: random.Random) -> Program:
    a, b = r.randint(2, 90), r.randint(2, 90)
    return f"import math\nprint(math.lcm({a}, {b}))", str(a * b // math.gcd(a, b))


def _base(r: random.Random) -> Program:
    n, base = r.randint(100, 5000), r.randint(2, 9)
    code = "def f(n):\n    s = ''\n    while n:\n"
    code += f"        s = str(n % {base}) + s\n        n //= {base}\n    return s\nprint(int(f({n}), {base}))"
    return code, str(n)


def _countdown(r: random.Random) -> Program:
    numbers = r.sample(range(2, 12), 3)
    a, b, c = numbers
    target = a * b + c
    code = (
        "import itertools\nfound = set()\n"
        f"for p in itertools.permutations({numbers}):\n"
        "    for o in itertools.product('+-*', repeat=2):\n"
        "        e = f'{p[0]}{o[0]}{p[1]}{o[1]}{p[2]}'\n"
        f"        if eval(e) == {target}: found.add(e)\n"
        f"print(bool(found) and all(eval(e) == {target} for e in found))"
    )
    return code, "True"


def _derangements(r: random.Random) -> Program:
    n = r.randint(3, 7)
    code = "from itertools import permutations\n"
    code += f"print(sum(all(p[i] != i for i in range({n})) for p in permutations(range({n}))))"
    count = round(math.factorial(n) * sum((-1) ** k / math.factorial(k) for k in range(n + 1)))
    return code, str(count)


def _sorting(r: random.Random) -> Program:
    words = ["".join(r.choices("abcdef", k=4)) for _ in range(6)]
    return f"print(*sorted({words}, reverse=True))", " ".join(sorted(words)[::-1])


def _caesar(r: random.Random) -> Program:
    text, k = "".join(r.choices("ABCDEFGHIJKLMNOPQRSTUVWXYZ", k=12)), r.randint(1, 25)
    shifted = "".join(chr((ord(ch) - 65 + k) % 26 + 65) for ch in text)
    return f"print(''.join(chr((ord(c) - 65 - {k}) % 26 + 65) for c in '{shifted}'))", text


def _polynomial(r: random.Random) -> Program:
    a, b, x = r.randint(1, 9), r.randint(1, 9), r.randint(-5, 5)
    code = f"from sympy import *\nx = Symbol('x')\nprint(expand((x + {a}) * (x - {b})).subs(x, {x}))"
    return code, str((x + a) * (x - b))


def _integral(r: random.Random) -> Program:
    n, top = r.randint(1, 5), r.randint(1, 6)
    code = f"import sympy as sp\nx = sp.symbols('x')\nprint(sp.integrate(x**{n}, (x, 0, {top})))"
    return code, str(Fraction(top ** (n + 1), n + 1))


def _shortest_path(r: random.Random) -> Program:
    n = r.randint(4, 8)
    walls = {(r.randint(1, n - 1), r.randint(1, n - 2)) for _ in range(2)} - {(n - 1, n - 1)}
    code = f"""
from collections import deque
walls = {walls!r}
queue, seen = deque([((0, 0), 0)]), {{(0, 0)}}
while queue:
    (x, y), d = queue.popleft()
    if (x, y) == ({n - 1}, {n - 1}):
        print(d)
        break
    for p in ((x+1, y), (x-1, y), (x, y+1), (x, y-1)):
        if 0 <= p[0] < {n} and 0 <= p[1] < {n} and p not in walls and p not in seen:
            seen.add(p)
            queue.append((p, d + 1))
"""
    # The left and the upper edge hold no wall, nor does the right column's end: a monotone path is always
    # there.
    return code, str(2 * (n - 1))


def _number_sequence(r: random.Random) -> Program:
    a, b, n = r.randint(1, 5), r.randint(1, 5), r.randint(5, 30)
    code = f"def f():\n    a, b = {a}, {b}\n    while True:\n        yield a\n        a, b = b, a + b\n"
    code += f"from itertools import islice\nprint(list(islice(f(), {n}))[-1])"
    x, y = a, b
    for _ in range(n - 1):
        x, y = y, x + y
    return code, str(x)


def _zebra(r: random.Random) -> Program:
    people = r.sample(["Ann", "Bob", "Cid", "Dee"], 4)
    clues = f"p.index('{people[0]}') < p.index('{people[1]}') < p.index('{people[2]}') and p[3] == '{people[3]}'"
    code = "from itertools import permutations\n"
    code += f"print([' '.join(p) for p in permutations(['Ann', 'Bob', 'Cid', 'Dee']) if {clues}])"
    found = [" ".join(p) for p in permutations(people) if list(p) == people]
    return code, str(found)


KINDS: tuple[Callable[[random.Random], Program], ...] = (
    _arithmetic,
    _quadratic,
    _linear_system,
    _primes,
    _simplify_fraction,
    _lcm,
    _base,
    _countdown,
    _derangements,
    _sorting,
    _caesar,
    _polynomial,
    _integral,
    _shortest_path,
    _number_sequence,
    _zebra,
)


def generate(count: int, seed: int) -> list[Program]:
    """(code, what it prints) in turn of each kind."""
    r = random.Random(seed)
    return [KINDS[number % len(KINDS)](r) for number in range(count)]
