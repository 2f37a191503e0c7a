"""Read the next item while the last one is written: reading, copying and writing tensors release Python's lock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")


class ReadAhead(Generic[T]):
    """`read(name)` gives `function(name)` and has one thread start on the name that follows in `order`.

    So at most one item is held besides those that were given out, and `function` never runs twice at a time. What it
    raises is raised by the `read` of that name. A name that is read out of order is computed then.
    """

    def __init__(self, function: Callable[[str], T], order: Sequence[str]) -> None:
        self._function = function
        self._following = dict(zip(order[:-1], order[1:], strict=True))
        self._ready: dict[str, Future[T]] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="read-ahead")

    def read(self, name: str) -> T:
        wanted = self._ready.pop(name, None) or self._thread.submit(self._function, name)
        following = self._following.get(name)
        if following is not None and not self._ready:
            self._ready[following] = self._thread.submit(self._function, following)
        return wanted.result()

    def __enter__(self) -> ReadAhead[T]:
        return self

    def __exit__(self, *exc: object) -> None:
        self._thread.shutdown(cancel_futures=True)
