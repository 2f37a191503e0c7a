"""Reading one item ahead of the writer."""

from __future__ import annotations

import threading

import pytest

from megatron_bridge.read_ahead import ReadAhead


def test_the_next_item_is_read_while_the_last_one_is_used():
    started: dict[str, threading.Event] = {name: threading.Event() for name in "abc"}

    def load(name: str) -> str:
        started[name].set()
        return name.upper()

    with ReadAhead(load, "abc") as values:
        assert values.read("a") == "A"
        assert started["b"].wait(60) and not started["c"].is_set()
        assert values.read("b") == "B" and values.read("c") == "C"


def test_an_error_belongs_to_the_item_it_came_from():
    def load(name: str) -> str:
        if name == "b":
            raise ValueError("b is damaged")
        return name

    with ReadAhead(load, "abc") as values:
        assert values.read("a") == "a"
        with pytest.raises(ValueError, match="b is damaged"):
            values.read("b")


def test_items_may_be_read_in_another_order():
    with ReadAhead(str.upper, "abcd") as values:
        assert [values.read(name) for name in "cadb"] == list("CADB")
