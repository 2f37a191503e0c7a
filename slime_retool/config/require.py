"""What every rule about a configuration ends in."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from megatron_bridge import flags
from megatron_bridge.checkpoint import what_it_is
from slime_retool.config.config import Config
from slime_retool.config.data_sets import split_slice
from slime_retool.errors import ConfigError
from slime_retool.run_folder import nearest_existing


def require(ok: bool, message: str) -> None:
    """ConfigError with `message` unless `ok`."""
    if not ok:
        raise ConfigError(message)


@contextmanager
def as_config_error() -> Iterator[None]:
    """A ValueError of the bridge, which knows no ConfigError, is one here."""
    try:
        yield
    except ValueError as error:
        raise ConfigError(str(error)) from error


def refuse_unused(config: Config, names: Iterable[str], needed: str) -> None:
    """ConfigError where one of the fields `names` was set: it has no effect without the flag `needed`."""
    for name in flags.changed(config, names):
        flag = flags.option_name(name)
        raise ConfigError(f"{flag} has no effect without {needed}; add it or drop {flag}")


def require_file(path: str, flag: str) -> None:
    """`path`, without a slice of rows behind it, is a file."""
    path, _ = split_slice(path)
    require(os.path.isfile(path), f"{flag}: no such file: {path}")


def require_folder(path: str, flag: str, holds: str) -> None:
    """`path` is a folder with a file `holds`."""
    require(os.path.isdir(path), f"{flag}: no such folder: {path}{what_it_is(path)}")
    require(os.path.exists(os.path.join(path, holds)), f"{flag}: {path} has no {holds}{what_it_is(path)}")


def require_writable(path: str, flag: str) -> None:
    """`path` is a folder to write in, or can be made one."""
    nearest = nearest_existing(path)
    require(os.path.isdir(nearest), f"{flag} {path}: {nearest} is not a folder; name another place")
    require(os.access(nearest, os.W_OK | os.X_OK), f"{flag} {path}: no permission to write in {nearest}")
