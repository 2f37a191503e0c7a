"""Flags from dataclass fields: which values a field may have stands on the field."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from typing import Any

import pytest

from megatron_bridge.flags import add_flags, flag, mistakes_in


@dataclass(frozen=True)
class Options:
    """Options with every kind of bound."""

    turns: int = flag(1, min=1, help="Turns.")
    lr: float | None = flag(None, above=0, help="Learning rate.")
    beta: float = flag(0.9, min=0, below=1, help="Beta.")
    top_k: int = flag(-1, min=1, off=-1, help="Top k.")
    dropout: float = flag(0.0, min=0, max=0, help="Dropout.")
    parts: list[str] = flag([], nargs="*", choices=("mlp", "moe"), help="Parts.")
    servers: list[str] = flag([], nargs="*", url=True, help="Servers.")


@pytest.mark.parametrize(
    ("name", "allowed", "refused", "rule"),
    [
        ("turns", [1, 7], [0, -1], "at least 1"),
        ("lr", [None, 1e-9, math.inf], [0.0, -1.0, math.nan], "above 0"),
        ("beta", [0.0, 0.999], [-0.1, 1.0, math.nan], "at least 0 and below 1"),
        ("top_k", [-1, 1, 50], [0, -2], "-1 or at least 1"),
        ("dropout", [0.0], [0.1, -0.1, math.nan], "0"),
    ],
)
def test_numbers_out_of_bounds_are_named_with_the_rule(name: str, allowed: list, refused: list, rule: str):
    for value in allowed:
        assert list(mistakes_in(Options(**{name: value}))) == []
    for value in refused:
        line = f"--{name.replace('_', '-')} must be {rule}, got {value}"
        assert list(mistakes_in(Options(**{name: value}))) == [line]


def test_every_item_of_a_list_is_looked_at():
    assert list(mistakes_in(Options(parts=["mlp", "mpl"]))) == ["--parts must be one of mlp, moe, got mpl"]
    urls = ["http://h:1", "https://h", "https://[::1]:8/v1"]
    assert list(mistakes_in(Options(servers=urls))) == []
    wrong = ["h:1", "ftp://h", "http://", "http:///x", "http://:80"]
    rule = "--servers must be an address like http://HOST:PORT, got"
    assert list(mistakes_in(Options(servers=[*wrong, *urls]))) == [f"{rule} {url}" for url in wrong]


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("turns", "--turns INT Turns. (default: 1)"),
        ("lr", "--lr FLOAT Learning rate. (above 0)"),
        ("beta", "--beta FLOAT Beta. (default: 0.9; at least 0 and below 1)"),
        ("servers", "--servers [URL ...] Servers."),
    ],
)
def test_help_shows_bounds_but_for_those_of_a_count(name: str, shown: str):
    parser: Any = argparse.ArgumentParser()
    add_flags(parser, Options)
    assert shown in " ".join(parser.format_help().split())
