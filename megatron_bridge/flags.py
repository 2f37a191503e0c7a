"""Command-line flags generated from dataclass fields: every option is declared once, as a typed field.

    @dataclass
    class RolloutArgs:
        '''Rollout.'''                     # first docstring line = title of the group in --help
        rollout_temperature: float = flag(1.0, help="Sampling temperature.")

`--rollout-temperature 0.7` fills the field `rollout_temperature`. Groups are combined by inheritance
(`class Config(RolloutArgs, ...)`), so a parsed configuration is one flat, typed object.
Pure Python: importing this needs nothing but the standard library.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import types
import typing
from collections.abc import Container, Sequence
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")
_KEY = "flag"


@dataclasses.dataclass(frozen=True)
class FlagSpec:
    """What argparse needs to know beyond the field's name, type and default."""

    help: str
    choices: tuple[str, ...] | None = None
    aliases: tuple[str, ...] = ()
    metavar: str | None = None
    nargs: str | None = None
    secret: bool = False


def flag(
    default: Any = None,
    *,
    help: str,
    choices: Sequence[str] | None = None,
    aliases: Sequence[str] = (),
    metavar: str | None = None,
    nargs: str | None = None,
    secret: bool = False,
) -> Any:
    """A dataclass field that is also a command-line flag.

    Lists take `nargs` ("*" or "+") and a list default; `aliases` are further spellings such as
    `"--rotary-scaling-factor"`. A `secret` is part of no `repr`; see also `secrets_of`.
    """
    spec = FlagSpec(help, tuple(choices) if choices else None, tuple(aliases), metavar, nargs, secret)
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata={_KEY: spec})
    return dataclasses.field(default=default, repr=not secret, metadata={_KEY: spec})


class OneLineParser(argparse.ArgumentParser):
    """argparse that reports a mistake in one line (exit code 2) and names the nearest known flag."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, **kwargs)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.error(unknown_flag_message(self, unknown[0]))
        return parsed


def unknown_flag_message(parser: argparse.ArgumentParser, token: str) -> str:
    """One line for a token that no flag takes, with the nearest flag where there is one."""
    if not token.startswith("--"):
        return f"unexpected argument {token!r}: every option is a --flag; quote values that hold spaces"
    name = token.split("=", 1)[0]
    near = difflib.get_close_matches(name, list(parser._option_string_actions), n=1, cutoff=0.6)
    hint = f"; did you mean {near[0]}?" if near else "; see --help"
    return f"unknown flag {name}{hint}"


def option_name(field_name: str) -> str:
    """`rollout_temperature` -> `--rollout-temperature`."""
    return "--" + field_name.replace("_", "-")


def groups_of(cls: type) -> list[type]:
    """The dataclasses that declare fields of `cls`, in order of declaration."""
    return [base for base in reversed(cls.__mro__) if dataclasses.is_dataclass(base) and _own_fields(base)]


def add_flags(parser: argparse.ArgumentParser, cls: type, shown: Container[str] | None = None) -> None:
    """Add one flag per flag-field of `cls` to `parser`, in one titled group per declaring dataclass.

    --help tells only of the fields in `shown`; None: of all.
    """
    hints = typing.get_type_hints(cls)
    for base in groups_of(cls):
        lines = (base.__doc__ or base.__name__).strip().splitlines()
        group = parser.add_argument_group(lines[0].rstrip("."), "\n".join(lines[1:]).strip() or None)
        for field in _own_fields(base):
            _add_flag(group, field, hints[field.name], hidden=shown is not None and field.name not in shown)


def names_of(cls: type, *, metavar: str) -> list[str]:
    """Fields whose value --help shows as `metavar`."""
    return [f.name for f in dataclasses.fields(cls) if _KEY in f.metadata and f.metadata[_KEY].metavar == metavar]


def secrets_of(cls: type) -> list[str]:
    """Fields whose value is neither to be printed nor stored."""
    return [f.name for f in dataclasses.fields(cls) if _KEY in f.metadata and f.metadata[_KEY].secret]


def from_namespace(cls: type[T], namespace: argparse.Namespace) -> T:
    """Build `cls` from parsed flags."""
    return cls(**{f.name: namespace.__dict__[f.name] for f in dataclasses.fields(cls) if _KEY in f.metadata})  # type: ignore[arg-type]


def to_flags(obj: Any) -> list[str]:
    """The shortest command line that rebuilds `obj` (fields that hold their default are left out)."""
    out: list[str] = []
    for field in dataclasses.fields(obj):
        if _KEY not in field.metadata:
            continue
        value, default, name = obj.__dict__[field.name], _default(field), option_name(field.name)
        if value == default:
            continue
        if isinstance(value, bool):
            out.append(name if value else name.replace("--", "--no-", 1))
        elif isinstance(value, list):
            out += [name, *map(str, value)]
        elif value is not None:
            out += [name, str(value)]
    return out


def _own_fields(cls: type) -> list[dataclasses.Field]:
    own = cls.__dict__.get("__annotations__", {})
    return [f for f in dataclasses.fields(cls) if f.name in own and _KEY in f.metadata]


def _default(field: dataclasses.Field) -> Any:
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default


def _scalar_type(hint: Any) -> Any:
    """`int | None` -> int, `list[str]` -> str, `bool` -> bool."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        hint = next(a for a in typing.get_args(hint) if a is not type(None))
    if typing.get_origin(hint) is list:
        hint = typing.get_args(hint)[0]
    return hint


def _add_flag(group: Any, field: dataclasses.Field, hint: Any, *, hidden: bool) -> None:
    spec: FlagSpec = field.metadata[_KEY]
    default, scalar = _default(field), _scalar_type(hint)
    text = spec.help.replace("%", "%%")
    if default is not None and default is not False and default != []:
        text += f" (default: {default})"
    names = [option_name(field.name), *spec.aliases]
    if scalar is bool:
        kind = "store_true" if default is False else argparse.BooleanOptionalAction
        action = group.add_argument(*names, dest=field.name, action=kind, default=default, help=text)
    else:
        action = group.add_argument(
            *names, dest=field.name, type=scalar, default=default, choices=spec.choices, nargs=spec.nargs,
            metavar=spec.metavar or (None if spec.choices else scalar.__name__.upper()), help=text,
        )  # fmt: skip
    if hidden:
        action.help = argparse.SUPPRESS  # only now: some actions add their default to the help they are given
