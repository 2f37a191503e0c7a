"""What running a snippet means, at every isolation level: a module `__main__`, a notebook's echo, a clean traceback.

Functions are bound at import, before any code runs, so that code which replaces them (in `builtins`, `traceback`, ...)
breaks itself and not its report. Standard library only.
"""

from __future__ import annotations
import __future__

import ast
import builtins
import errno
import linecache
import sys
import traceback
import types
from typing import Any, NamedTuple

_MAX_ERROR = 4000
_MAX_FRAMES = (4, 8)
_len, _isinstance, _repr, _type, _int = len, isinstance, repr, type, int
_compile, _exec, _eval = compile, exec, eval
_LIMIT_ERRORS = {errno.ENOSPC: "disk", errno.EFBIG: "file_size", errno.EMFILE: "open_files"}
_BaseException, _MemoryError, _SystemExit, _OSError = BaseException, MemoryError, SystemExit, OSError
_Expr, _Expression, _ONLY_AST = ast.Expr, ast.Expression, ast.PyCF_ONLY_AST
_FUTURE_FLAGS = sum(vars(__future__)[name].compiler_flag for name in __future__.all_feature_names)
_TracebackException, _StackSummary = traceback.TracebackException, traceback.StackSummary


class Outcome(NamedTuple):
    """How a snippet ended. `error` is None when it ran to its end or left with exit code 0."""

    error: str | None = None
    limit: str | None = None
    """The limit that the error comes from, where it tells: `memory`, `disk`, `file_size` or `open_files`."""
    result: str | None = None


def main_module() -> dict[str, Any]:
    """A fresh `__main__` and its namespace."""
    module = types.ModuleType("__main__")
    module.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = module
    sys.argv = [""]
    # What `site` adds to an interpreter, without its effects.
    builtins.__dict__.update(exit=sys.exit, quit=sys.exit, input=_no_input)
    return module.__dict__


_input = input


def allow_input() -> None:
    """There is a standard input to read from."""
    builtins.__dict__["input"] = _input


def _no_input(prompt: object = "") -> str:
    raise EOFError("input() is not available: nobody is there to answer")


def run(code: str, filename: str, namespace: dict[str, Any], limit: int, memory_mb: int) -> Outcome:
    """Execute in `namespace`; `result` is the `repr` of a bare last expression, cut to `limit` characters."""
    linecache.cache[filename] = (_len(code), None, code.splitlines(True), filename)
    try:
        return Outcome(result=_execute(code, filename, namespace, limit))
    except _SystemExit as stop:
        if stop.code is None or (_isinstance(stop.code, _int) and stop.code == 0):
            return Outcome()
        return Outcome(error=f"SystemExit: {stop.code}")
    except _MemoryError as error:
        text = f"{describe(error, filename)}\n(the memory limit is {memory_mb} MB)"
        return Outcome(error=text, limit="memory")
    except _OSError as error:
        return Outcome(error=describe(error, filename), limit=_LIMIT_ERRORS.get(error.errno or 0))
    except _BaseException as error:
        return Outcome(error=describe(error, filename))


def _execute(code: str, filename: str, namespace: dict[str, Any], limit: int) -> str | None:
    tree = _compile(code, filename, "exec", _ONLY_AST, True)
    last = tree.body.pop() if tree.body and _isinstance(tree.body[-1], _Expr) else None
    future = 0  # what was split off has the flags of the rest
    if tree.body or last is None:
        body = _compile(tree, filename, "exec", 0, True)
        future = body.co_flags & _FUTURE_FLAGS
        _exec(body, namespace)
    if last is None:
        return None
    value = _eval(_compile(_Expression(last.value), filename, "eval", future, True), namespace)
    if value is None:
        return None
    namespace["_"] = value
    text = _repr(value)
    if _len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]} ... [{_len(text) - 2 * half} characters omitted] ... {text[_len(text) - half :]}"


def describe(error: BaseException, filename: str) -> str:
    """The traceback, reduced to frames of the code itself, bounded."""
    try:
        report = _TracebackException(_type(error), error, error.__traceback__, compact=True)
        _keep_own_frames(report, filename)
        text = "".join(report.format()).rstrip("\n")
    except _BaseException:  # an exception whose own text cannot be made
        text = _type(error).__name__
    return text if _len(text) <= _MAX_ERROR else f"{text[:1500]}\n...\n{text[-2400:]}"


def _keep_own_frames(report: traceback.TracebackException, filename: str) -> None:
    # Cells of a session share the part before their number.
    mark = filename.split(" ")[0].rstrip(">")
    own: list[Any] = [frame for frame in report.stack if frame.filename.startswith(mark)]
    first, last = _MAX_FRAMES
    if _len(own) > first + last:
        own = own[:first] + own[-last:]
    # Rebuilt without columns: the lines of carets say little for their length.
    report.stack = _StackSummary.from_list([(frame.filename, frame.lineno, frame.name, frame.line) for frame in own])
    for linked in (report.__cause__, report.__context__):
        if linked is not None:
            _keep_own_frames(linked, filename)
