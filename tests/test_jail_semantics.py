"""What a snippet means: as CPython itself has it, with bounded texts and the right label for what went wrong."""

from __future__ import annotations

import asyncio
import contextlib
import io
import itertools
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from test_jail import LEVELS, in_box

from slime_retool.sandbox import Result, Sandbox, Status
from slime_retool.sandbox.child import semantics


def run(code: str, namespace: dict[str, Any] | None = None, echo: bool = True) -> semantics.Outcome:
    space = {"__name__": "__main__"} if namespace is None else namespace
    return semantics.run(code, "<string>", space, limit=1000, memory_mb=7, echo=echo)


DEEP = {
    "sum of 1,200 terms": ("+".join(["1"] * 1200), 1200),
    "sum of 2,500 terms": ("+".join(["1"] * 2500), 2500),
    "600 chained calls": ("' a '" + ".strip()" * 600, "a"),
    "2,000 attributes": ("1" + " .real" * 2000, 1),
    "150 brackets": ("len(" + "[" * 150 + "]" * 150 + ")", 1),
}
AROUND = {
    "alone": ("", ""),
    "after statements": ("x = 1\ny = 'é'; z = 3\n", ""),
    "after a semicolon": ("x = 1; ", "  # é"),
    "before a semicolon": ("x = 1\n", ";"),
    "in brackets": ("x = 1\n(", "\n)\n\n"),
    "continued": ("x = 1; \\\n ", "\n# the end\n"),
    "old line ends": ("x = 1\r\ny = 2\r", "\r\n"),
    "after a future": ("from __future__ import annotations\n", ""),
    "a tuple's": ("*'', ", ""),
    "after a byte order mark": ("\ufeff", ""),
    "after a coding line": ("# coding: latin-1\nx = 'é'\n", ""),
}


@pytest.mark.parametrize("deep", DEEP)
@pytest.mark.parametrize("around", AROUND)
def test_a_deep_last_expression_is_run_and_echoed(deep: str, around: str) -> None:
    """The way to an echo leads through a syntax tree, which Python converts with less depth than it compiles."""
    (expression, value), (before, after) = DEEP[deep], AROUND[around]
    outcome = run(before + expression + after)
    assert outcome == semantics.Outcome(result=repr((value,) if around == "a tuple's" else value))


PIECES = """x = 1
x
print(x)
f()
(y := 3)
*x, 1
'doc'
x if y else z
# a comment
# it goes on \\
x = 1 + \\
x = \"\"\"
\"\"\"
\"\"\" + \"\"\"text
foo(
)
[
]
else:
f(); g()
f();
if x:
    y = 2
@f
def f(): return 1
try: pass
from __future__ import annotations
match (x)
yield 1

\tx
\x0cx
\rx
x \r""".split("\n")


def test_the_last_line_alone_is_split_off_as_the_syntax_tree_splits_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """All programs of up to three lines, and what they compile to or the error, down to each instruction's place."""

    def parts(code: str) -> Any:
        try:
            body, last = semantics._compiled(code, "<string>", echo=True)
        except (SyntaxError, ValueError) as error:
            return repr(error)
        comments_only = body is not None and not body.co_names and body.co_consts == (None,)
        return [shape(each) for each in (None if comments_only else body, last)]

    def shape(code: Any) -> Any:
        if not isinstance(code, types.CodeType):
            return type(code), repr(code)
        places = list(code.co_positions()) if sys.version_info >= (3, 11) else list(code.co_lines())
        return code.co_code, code.co_names, code.co_flags, places, [shape(each) for each in code.co_consts]

    programs = ["\n".join(lines) for count in (1, 2, 3) for lines in itertools.product(PIECES, repeat=count)]
    programs = [*programs[: 1 + len(PIECES) ** 2], *programs[1 + len(PIECES) ** 2 :: 7]]
    quick = [parts(code) for code in programs]
    known = sum(semantics._split_before_last_line(code, "<string>") is not None for code in programs)
    monkeypatch.setattr(semantics, "_split_before_last_line", lambda code, filename: None)
    for code, found in zip(programs, quick, strict=True):
        assert found == parts(code), code
    assert known > len(programs) // 20


DEEP_STATEMENTS = {
    "sum": ("x = " + "+".join(["1"] * 1200), 1200),
    "sum of 2,500": ("x = " + "+".join(["1"] * 2500), 2500),
    "elif": ("n = 1199\nif n < 0: pass\n" + "".join(f"elif n == {i}: x = {i}\n" for i in range(1200)), 1199),
    "chain": ("x = ' a '" + ".strip()" * 600, "a"),
}


@pytest.mark.parametrize("name", DEEP_STATEMENTS)
def test_deep_statements_run_before_an_echo_and_without_one(name: str) -> None:
    code, value = DEEP_STATEMENTS[name]
    space: dict[str, Any] = {}
    assert run(code, space) == semantics.Outcome() and space["x"] == value
    assert run(code + "\nx").result == repr(value)
    assert run(code + "\n'in a line that fails'\n1 / 0").error.splitlines()[-1].startswith("ZeroDivisionError")


def test_lines_of_a_traceback_are_those_of_the_code_also_where_it_is_deep() -> None:
    deep = "+".join(["1"] * 2500)
    error = run(f"def f():\n    return 1 / 0\n\nx = {deep}\n(\n  f())").error
    assert "line 2, in f" in error and "return 1 / 0" in error and ", line 6, in <module>" in error


def test_code_that_python_refuses_is_an_error_and_not_a_lack_of_memory() -> None:
    for code in ("x = " + "-" * 20_000 + "1", "x = " + "[" * 500 + "]" * 500, "lambda: (yield" + "(" * 150):
        outcome = run(code)
        assert outcome.error and outcome.limit is None and "memory limit" not in outcome.error
    assert run("raise MemoryError").limit == "memory"
    assert "the memory limit is 7 MB" in run("x = [0] * 10**18").error


def test_a_byte_order_mark_is_no_part_of_the_code() -> None:
    assert run("\ufeffx = 6\nx * 7").result == "42"
    assert "SyntaxError" in run("x = 6\n\ufeffx").error


EXITS = {
    "": (None, 0),
    "None": (None, 0),
    "0": (None, 0),
    "False": (None, 0),
    "3": ("SystemExit: 3", 3),
    "True": ("SystemExit: True", 1),
    "-1": ("SystemExit: -1", 255),
    "256": ("SystemExit: 256", 0),
    "1 << 70": ("SystemExit: 1180591620717411303424", 255),
    "'bye'": ("SystemExit: bye", 1),
    "(1, 2)": ("SystemExit: (1, 2)", 1),
    "2.5": ("SystemExit: 2.5", 1),
    "''": ("SystemExit: ", 1),
}


@pytest.mark.parametrize("argument", EXITS)
def test_an_exit_has_the_code_that_python_gives_it(argument: str) -> None:
    error, code = EXITS[argument]
    for echo in (True, False):
        said = io.StringIO()
        with contextlib.redirect_stderr(said):
            assert run(f"import sys\nsys.exit({argument})", echo=echo) == semantics.Outcome(error, exit_code=code)
        text = argument.strip("'") + "\n"
        assert said.getvalue() == (text if code == 1 and argument != "True" and not echo else "")


ODD = {
    "exit with a huge text": "import sys\nsys.exit('x' * 3_000_000)",
    "exit whose text raises": "class X:\n    def __str__(self): raise ValueError\nraise SystemExit(X())",
    "exit whose code raises": "class E(SystemExit):\n    code = property(lambda self: 1 / 0)\nraise E",
    "exit with digits": "raise SystemExit(10 ** 6000)",
    "exit with a lie": "class X:\n    __class__ = int\nraise SystemExit(X())",
    "a huge text": "raise ValueError('x' * 3_000_000)",
    "a text that raises": "class E(Exception):\n    def __str__(self): raise SystemExit\nraise E",
    "a class without a name": "class M(type):\n    __name__ = property(lambda c: 1 / 0)\n"
    "class E(Exception, metaclass=M):\n    def __str__(self): 1 / 0\nraise E",
    "a repr that exits": "class A:\n    def __repr__(self): raise SystemExit('x' * 9000)\nA()",
    "a name of 9,000 letters": "x" * 9000,
    "a lost cache": "import linecache\nlinecache.cache = None\n1 / 0",
}


@pytest.mark.parametrize("name", ODD)
def test_an_error_is_bounded_and_never_ours(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("linecache.cache", {})
    outcome = run(ODD[name])
    assert outcome.error and len(outcome.error) <= semantics.MAX_ERROR and outcome.limit is None
    if "exit" in name and "repr" not in name:
        assert outcome.error.startswith("SystemExit") and outcome.exit_code in (1, 255)


def test_an_echo_is_bounded_whatever_its_text_says_of_itself() -> None:
    liar = "class S(str):\n    def __len__(self): return 0\n    def __getitem__(self, key): return self\n"
    result = run(liar + "class A:\n    def __repr__(self): return S('y' * 5000)\nA()").result
    assert result == "y" * 500 + " ... [4000 characters omitted] ... " + "y" * 500


def test_without_an_echo_the_last_expression_is_one_like_any_other() -> None:
    space: dict[str, Any] = {}
    assert run("x = 5\nx", space, echo=False) == semantics.Outcome() and "_" not in space
    assert run("class A:\n    def __repr__(self): 1 / 0\nA()", echo=False).error is None


@pytest.mark.parametrize("level", LEVELS)
def test_odd_ends_have_the_right_label_in_the_jail(level: str) -> None:
    newlines = "\n" * ((1 << 20) - 10)
    codes = {
        "import sys\nsys.exit('x' * 3_000_000)": (Status.ERROR, None, 1),
        "class X:\n    def __str__(self): raise ValueError\nraise SystemExit(X())": (Status.ERROR, None, 1),
        "import sys\nsys.exit(7)": (Status.ERROR, None, 7),
        "import os\nos._exit(7)": (Status.ERROR, None, 7),
        "import os\nos._exit(0)": (Status.OK, None, 0),
        "import ctypes\nctypes.string_at(0)": (Status.KILLED, None, -11),
        newlines + "1 / 0": (Status.ERROR, None, None),
        newlines: (Status.OK, None, None),
        "x = " + "-" * 9000 + "1": (Status.ERROR, None, None),
        "print('+'.join('1'))\nx = " + "+".join(["1"] * 1200): (Status.OK, None, None),
        "import sys\nsys.settrace(lambda *_: 1 / 0)": (Status.ERROR, None, None),
        "import sys\nsys.setprofile(lambda *_: 1 / 0)": (Status.ERROR, None, None),
        "import json\njson.JSONEncoder.encode = json.dumps = None": (Status.OK, None, None),
        "import os\nos.close(3)": (Status.ERROR, None, 1),
        "import os\nos.closerange(0, 99)": (Status.ERROR, None, 1),
        "import os\nos.dup2(os.open('/dev/null', os.O_RDONLY), 3)": (Status.ERROR, None, 1),
        "k = []\nwhile True: k.append(bytearray(1000))": (Status.MEMORY, "memory", None),
    }

    async def use(box: Sandbox) -> tuple[list[Result], list[Result]]:
        session = box.session("s")
        cells = [await session.run(code, timeout=60) for code in codes]
        return list(await asyncio.gather(*(box.run(code, timeout=60) for code in codes))), cells

    calls, cells = in_box(level, use, memory_mb=100)
    for (code, expected), result, cell in zip(codes.items(), calls, cells, strict=True):
        seen = (result.status, result.limit, result.exit_code)
        assert (code[:50], seen) == (code[:50], expected), result.error
        assert len(result.error or "") < 4200 and "setting up" not in f"{result.error}{cell.error}{result.stderr}"
        if "os._exit(0)" not in code:
            assert (code[:50], cell.status, cell.limit) == (code[:50], *expected[:2]), cell.error


@pytest.mark.parametrize("level", LEVELS)
def test_a_cell_that_takes_every_builtin_breaks_itself_and_no_report(level: str) -> None:
    take = (
        "import builtins, json, os\nprint('before')\n"
        "for name in [name for name in vars(builtins) if name not in ('setattr', 'print', '__build_class__')]:\n"
        "    setattr(builtins, name, None)\n"
        "json.loads = json.dumps = json.JSONDecoder.decode = json.JSONEncoder.iterencode = os.write = None\n"
    )

    async def use(box: Sandbox) -> list[Result]:
        session = box.session("s")
        cells = [await session.run(code, fetch_files=("f",)) for code in (take, "x = 1\nprint(x)", "1 / 0", "x")]
        return [await box.run(take, fetch_files=("f",)), *cells]

    once, *cells = in_box(level, use)
    assert [each.stdout for each in (once, *cells)] == ["before\n", "before\n", "1\n", "", ""]
    assert [each.status for each in cells] == [Status.OK, Status.OK, Status.ERROR, Status.OK], cells
    assert cells[3].result == "1" and "ZeroDivisionError" in cells[2].error


@pytest.mark.parametrize("level", LEVELS)
def test_code_has_the_depth_that_it_has_in_an_interpreter_of_its_own(level: str, tmp_path: Path) -> None:
    codes = [
        "x = " + "+".join(["1"] * 2950) + "\nprint(x)",
        "def f(n): return n and 1 + f(n - 1)\nprint(f(994))",
        "def f(n): return n and 1 + f(n - 1)\nprint(f(1000))",
    ]

    async def use(box: Sandbox) -> list[list[str]]:
        session = box.session("s")
        await session.run("1")
        return [[(await place.run(code)).stdout for code in codes] for place in (box, session)]

    plain = []
    for code in codes:
        (tmp_path / "code.py").write_text(code)
        done = subprocess.run([sys.executable, str(tmp_path / "code.py")], capture_output=True, text=True, timeout=60)
        plain.append(done.stdout)
    assert plain == ["2950\n", "994\n", ""]
    assert in_box(level, use) == [plain] * 2


@pytest.mark.parametrize("level", LEVELS)
def test_equal_code_gives_equal_output(level: str) -> None:
    code = (
        "import os, sys\nprint({'a', 'b', 'c', 'd', 'e', 1.5, None}, hash('text'), list(set('some letters')))\n"
        "open('m.py', 'w').write('v = {\"x\", \"y\", \"z\"}')\nimport m\nprint(m.v, sorted(os.listdir('.')))\n"
    )

    async def use(box: Sandbox) -> set[str]:
        results = [await box.run(code), await box.run(code + "import numpy\n"), await box.session("s").run(code)]
        assert all(result.status is Status.OK for result in results), results
        return {result.stdout for result in results}

    outputs = in_box(level, use, packages=("numpy",)) | in_box(level, use, packages=("numpy",))
    assert len(outputs) == 1 and "__pycache__" not in outputs.pop()


@pytest.mark.parametrize("level", [*LEVELS[:1], "none"])
def test_the_interpreter_is_as_bare_as_an_isolated_one(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its variables reach it now, so none of the caller's may."""
    for name, value in {"PYTHONPATH": "/evil", "PYTHONHASHSEED": "7", "PYTHONOPTIMIZE": "2", "PYTHONUTF8": "0"}.items():
        monkeypatch.setenv(name, value)
    code = (
        "import os, sys\nprint(sys.flags.optimize, sys.flags.utf8_mode, sys.flags.no_site, sys.flags.no_user_site,"
        " sys.dont_write_bytecode, sorted(name for name in os.environ if name.startswith('PYTHON')))\n"
        "print([path for path in sys.path if 'evil' in path or path.endswith('slime_retool/sandbox')])"
    )

    async def use(box: Sandbox) -> Result:
        return await box.run(code)

    assert in_box(level, use).stdout == "0 1 1 1 True ['PYTHONHASHSEED']\n[]\n"
    assert sys.flags.optimize == 0
