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

MAX_ERROR = 4000
"""Characters of an error's text, without what is said of a limit."""
_MAX_FRAMES = (4, 8)
_BYTES_TO_COMPILE = 1000
"""Memory that compiling takes for each character of code, at most (measured: 600)."""
_len, _isinstance, _repr, _str, _type, _int, _sum = len, isinstance, repr, str, type, int, sum
_exact = str.__str__
"""A plain string, of one of a subclass whose methods may lie."""
_print, _bytearray, _name_of, _low_byte = print, bytearray, type.__dict__["__name__"].__get__, int.__and__
_compile, _exec, _eval = compile, exec, eval
_LIMIT_ERRORS = {errno.ENOSPC: "disk", errno.EFBIG: "file_size", errno.EMFILE: "open_files"}
_BaseException, _Exception, _SystemExit, _OSError = BaseException, Exception, SystemExit, OSError
_MemoryError, _RecursionError = MemoryError, RecursionError
_Expr, _Expression, _ONLY_AST = ast.Expr, ast.Expression, ast.PyCF_ONLY_AST
_NO_EXPRESSION = frozenset(["", *" \t\f#@)]}"])
"""What no line begins with that is an expression by itself."""
_FUTURE_FLAGS = sum(vars(__future__)[name].compiler_flag for name in __future__.all_feature_names)
_TracebackException, _StackSummary = traceback.TracebackException, traceback.StackSummary


class Outcome(NamedTuple):
    """How a snippet ended. `error` is None when it ran to its end or left with exit code 0."""

    error: str | None = None
    limit: str | None = None
    """The limit that the error comes from, where it tells: `memory`, `disk`, `file_size` or `open_files`."""
    result: str | None = None
    exit_code: int | None = None
    """What `sys.exit` was called with, as the parent of a process would see it."""


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


def run(
    code: str, filename: str, namespace: dict[str, Any], limit: int, memory_mb: int, echo: bool = True
) -> Outcome:
    """Execute in `namespace`; `result` is the `repr` of a bare last expression, cut to `limit` characters.

    Without `echo` as `python FILE` does: the last expression is one like any other, and the text that `sys.exit` was
    called with goes to standard error.
    """
    compiling = True
    try:
        code = code.removeprefix("\ufeff")
        linecache.cache[filename] = (_len(code), None, code.splitlines(True), filename)
        body, last = _compiled(code, filename, echo)
        compiling = False
        if body is not None:
            _exec(body, namespace)
        return Outcome(result=None if last is None else _echoed(last, namespace, limit))
    except _SystemExit as stop:
        return _exit(stop, echo)
    except _MemoryError as error:
        text = describe(error, filename)
        if compiling and _has_room(_BYTES_TO_COMPILE * _len(code)):
            return Outcome(error=f"{text}\n(the code is nested too deeply for Python's parser)")
        return Outcome(error=f"{text}\n(the memory limit is {memory_mb} MB)", limit="memory")
    except _OSError as error:
        return Outcome(error=describe(error, filename), limit=limit_of(error))
    except _BaseException as error:
        return Outcome(error=describe(error, filename))


def limit_of(error: OSError) -> str | None:
    """The limit behind the kernel's refusal, if it is one."""
    return _LIMIT_ERRORS.get(error.errno or 0)


def _has_room(count: int) -> bool:
    """Whether so many bytes could be had."""
    try:
        return _len(_bytearray(count)) == count
    except _MemoryError:
        return False


def _exit(stop: SystemExit, echo: bool) -> Outcome:
    """As the interpreter ends: an integer is the exit code, all else is a text for people, and code 1."""
    text, status = "SystemExit", 1
    try:
        code: Any = stop.code
        if code is None:
            return Outcome(exit_code=0)
        if _isinstance(code, _int):
            status = _low_byte(code, 0xFF) if -(1 << 63) <= code < 1 << 63 else 0xFF
            if code == 0:
                return Outcome(exit_code=0)
        shown = _exact(_str(code))
        if not (echo or _isinstance(code, _int)):
            _print(shown, file=sys.stderr)
        text = _bounded(f"{text}: {shown}")
    except _BaseException:  # a text that cannot be made
        pass
    return Outcome(error=text, exit_code=status)


_Code = types.CodeType


def _compiled(code: str, filename: str, echo: bool) -> tuple[_Code | None, _Code | None]:
    """All but a bare last expression, and that expression; None for what there is none of."""
    if not echo:
        return _compile(code, filename, "exec", 0, True), None
    split = _split_before_last_line(code, filename)
    if split is not None:
        return split
    try:
        tree = _compile(code, filename, "exec", _ONLY_AST, True)
    except _RecursionError:  # the compiler itself may go deeper
        return _compile(code, filename, "exec", 0, True), None
    last = tree.body.pop() if tree.body and _isinstance(tree.body[-1], _Expr) else None
    try:
        body = _compile(tree, filename, "exec", 0, True) if tree.body or last is None else None
        if last is None:
            return body, None
        # What was split off has the flags of the rest.
        future = 0 if body is None else body.co_flags & _FUTURE_FLAGS
        return body, _compile(_Expression(last.value), filename, "eval", future, True)
    except _RecursionError:
        if last is None:
            return _compile(code, filename, "exec", 0, True), None
        return _compiled_from_text(code, last, filename)


def _split_before_last_line(code: str, filename: str) -> tuple[_Code | None, _Code] | None:
    """As `_compiled`, of code whose last line is an expression, in half the time: without a syntax tree as objects.

    None where it is not known. What stands before a line compiles by itself only if no string, bracket or statement
    goes on in that line.
    """
    start = code.rfind("\n", 0, _len(code.rstrip())) + 1
    before, last = code[:start], code[start:]
    if last[:1] in _NO_EXPRESSION or "\r" in code or "__future__" in before:
        return None
    try:
        expression = _compile("\n" * before.count("\n") + last, filename, "eval", 0, True)
        body = None if not before or before.isspace() else _compile(before, filename, "exec", 0, True)
    except _Exception:
        return None
    return body, expression


def _compiled_from_text(code: str, last: ast.Expr, filename: str) -> tuple[_Code, _Code]:
    """As `_compiled`, of code that the compiler takes but whose syntax tree is too deep to be given back to it."""
    text = code.replace("\r\n", "\n").replace("\r", "\n").encode()
    lines = text.split(b"\n")

    def offset(line: int, column: int) -> int:
        return _sum([_len(each) + 1 for each in lines[: line - 1]]) + column

    assert last.end_lineno is not None and last.end_col_offset is not None
    start, end = offset(last.lineno, last.col_offset), offset(last.end_lineno, last.end_col_offset)
    body = _compile((text[:start] + b"pass" + text[end:]).decode(), filename, "exec", 0, True)
    expression = "\n" * (last.lineno - 1) + "(" + text[start:end].decode() + ")"
    return body, _compile(expression, filename, "eval", body.co_flags & _FUTURE_FLAGS, True)


def _echoed(last: _Code, namespace: dict[str, Any], limit: int) -> str | None:
    value = _eval(last, namespace)
    if value is None:
        return None
    namespace["_"] = value
    text = _exact(_repr(value))
    if _len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]} ... [{_len(text) - 2 * half} characters omitted] ... {text[_len(text) - half :]}"


def _bounded(text: str) -> str:
    return text if _len(text) <= MAX_ERROR else f"{text[:1500]}\n...\n{text[-2400:]}"


def describe(error: BaseException, filename: str) -> str:
    """The traceback, reduced to frames of the code itself, bounded."""
    try:
        report = _TracebackException(_type(error), error, error.__traceback__, compact=True)
        _keep_own_frames(report, filename)
        text = "".join(report.format()).rstrip("\n")
    except _BaseException:  # an exception whose own text cannot be made
        text = _name_of(_type(error))
    return _bounded(text)


def brief(error: BaseException) -> str:
    """Its last line, bounded."""
    try:
        return _bounded("".join(_TracebackException(_type(error), error, None).format_exception_only()).rstrip("\n"))
    except _BaseException:
        return _name_of(_type(error))


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
