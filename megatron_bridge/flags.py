"""Command-line flags generated from dataclass fields: every option is declared once, as a typed field.

    @dataclass
    class RolloutArgs:
        '''Rollout.'''                     # first docstring line = title of the group in --help
        rollout_temperature: float = flag(1.0, above=0, help="Sampling temperature.")

`--rollout-temperature 0.7` fills the field `rollout_temperature`. Groups are combined by inheritance
(`class Config(RolloutArgs, ...)`), so a parsed configuration is one flat, typed object. Which values a field may have
stands on the field; `mistakes_in` checks them all, wherever the object came from.
Pure Python: importing this needs nothing but the standard library.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")
_KEY = "flag"


@dataclasses.dataclass(frozen=True)
class FlagSpec:
    """A flag beyond its field's name, type and default: how argparse takes it, and which values it may have.

    Bounds and choices are of each item where the field is a list. None, where the field may be None, is allowed.
    """

    help: str
    choices: tuple[str, ...] | None = None
    aliases: tuple[str, ...] = ()
    """Further spellings, such as "--rotary-scaling-factor"."""
    metavar: str | None = None
    nargs: str | None = None
    """"*" or "+" of a list."""
    secret: bool = False
    """Neither printed nor stored."""
    min: float | None = None
    max: float | None = None
    above: float | None = None
    below: float | None = None
    off: float | None = None
    """A number out of the bounds that is allowed as well."""
    url: bool = False
    """An http:// or https:// address."""

    @property
    def bounds(self) -> str:
        """The numbers allowed, in words: "at least 0 and below 1"; empty where all are."""
        if self.min is not None and self.min == self.max:
            return f"{self.min:g}"
        words = {"at least": self.min, "above": self.above, "at most": self.max, "below": self.below}
        text = " and ".join(f"{word} {bound:g}" for word, bound in words.items() if bound is not None)
        return text if self.off is None else f"{self.off:g} or {text}"

    def broken_rule(self, value: Any) -> str | None:
        """What `value` must be and is not; None when it is allowed. NaN is within no bounds."""
        if self.choices is not None and value not in self.choices:
            return f"one of {', '.join(self.choices)}"
        if self.url and not re.match(r"https?://[^\s/?#:]", value):
            return "an address like http://HOST:PORT"
        within = (
            (self.min is None or value >= self.min)
            and (self.max is None or value <= self.max)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )
        return None if within or value == self.off else self.bounds


def flag(default: Any = None, **spec: Any) -> Any:
    """A dataclass field that is also a command-line flag. The keywords are the fields of `FlagSpec`."""
    made = FlagSpec(**spec)
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata={_KEY: made})
    return dataclasses.field(default=default, repr=not made.secret, metadata={_KEY: made})


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
    """One line for a token that no flag takes, with the flags that it begins, or the nearest one."""
    if not token.startswith("--"):
        return f"unexpected argument {token!r}: every option is a --flag; quote values that hold spaces"
    name = token.split("=", 1)[0]
    known = list(parser._option_string_actions)
    begun = [flag for flag in known if flag.startswith(name)]
    near = begun[:3] or difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    hint = f"; did you mean {' or '.join(near)}?" if near else "; see --help"
    return f"unknown flag {name}{hint}"


def option_name(field_name: str) -> str:
    """`rollout_temperature` -> `--rollout-temperature`."""
    return "--" + field_name.replace("_", "-")


def groups_of(cls: type) -> list[type]:
    """The dataclasses that declare fields of `cls`, in order of declaration."""
    return [base for base in reversed(cls.__mro__) if dataclasses.is_dataclass(base) and _own_fields(base)]


def flags_of(group: type) -> Iterator[tuple[dataclasses.Field, FlagSpec, Any]]:
    """The flags that the dataclass `group` itself declares, each with its default."""
    return ((field, field.metadata[_KEY], _default(field)) for field in _own_fields(group))


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


def is_frozen_group(cls: Any) -> bool:
    """Whether `cls` is a frozen dataclass of flags only."""
    frozen = dataclasses.is_dataclass(cls) and cls.__dataclass_params__.frozen  # type: ignore[union-attr]
    return frozen and all(_KEY in f.metadata for f in dataclasses.fields(cls))


def from_namespace(cls: type[T], namespace: argparse.Namespace) -> T:
    """Build `cls` from parsed flags, and from what else a parser has put under the name of a field."""
    given = vars(namespace)
    return cls(**{f.name: given[f.name] for f in dataclasses.fields(cls) if f.name in given})  # type: ignore[arg-type]


def changed(obj: Any, names: Iterable[str]) -> list[str]:
    """Those of the fields `names` that hold another value than their default."""
    return [f.name for f in dataclasses.fields(obj) if f.name in names and getattr(obj, f.name) != _default(f)]


def mistakes_in(*objects: Any) -> Iterator[str]:
    """One line for each flag-field whose value is not allowed, e.g. "--lr must be above 0, got -1.0"."""
    for field, spec, value in _flags_of(objects):
        for each in value if isinstance(value, list) else [value]:
            if each is not None and (rule := spec.broken_rule(each)) is not None:
                yield f"{option_name(field.name)} must be {rule}, got {each}"


def secrets_in(*objects: Any) -> list[str]:
    """Fields with a value that is neither to be printed nor stored."""
    return [field.name for field, spec, value in _flags_of(objects) if spec.secret and value is not None]


def public_values(*objects: Any) -> dict[str, Any]:
    """The value of each flag-field but secrets."""
    return {field.name: value for field, spec, value in _flags_of(objects) if not spec.secret}


def to_flags(*objects: Any) -> list[str]:
    """The shortest command line that rebuilds the objects, but for secrets (a field with its default is left out)."""
    out: list[str] = []
    for field, spec, value in _flags_of(objects):
        name = option_name(field.name)
        if spec.secret or value == _default(field):
            continue
        if isinstance(value, bool):
            out.append(name if value else name.replace("--", "--no-", 1))
        elif isinstance(value, list):
            out += [name, *map(str, value)]
        elif value is not None:
            out += [name, str(value)]
    return out


def _flags_of(objects: Iterable[Any]) -> Iterator[tuple[dataclasses.Field, FlagSpec, Any]]:
    for obj in objects:
        for field in dataclasses.fields(obj):
            if _KEY in field.metadata:
                yield field, field.metadata[_KEY], getattr(obj, field.name)


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
    shown = default is not None and default is not False and default != []
    bounds = "" if spec.bounds == "at least 1" else spec.bounds  # goes without saying where something is counted
    if notes := [note for note in (f"default: {default}" * shown, bounds) if note]:
        text += f" ({'; '.join(notes)})"
    names = [option_name(field.name), *spec.aliases]
    if scalar is bool:
        kind = "store_true" if default is False else argparse.BooleanOptionalAction
        action = group.add_argument(*names, dest=field.name, action=kind, default=default, help=text)
    else:
        shown_as = "URL" if spec.url else None if spec.choices else scalar.__name__.upper()
        action = group.add_argument(
            *names, dest=field.name, type=scalar, default=default, choices=spec.choices, nargs=spec.nargs,
            metavar=spec.metavar or shown_as, help=text,
        )  # fmt: skip
    if hidden:
        action.help = argparse.SUPPRESS  # only now: some actions add their default to the help they are given
