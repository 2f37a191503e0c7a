"""Keeps engines and their router serving: who died or hangs leaves, a replacement starts, the others go on.

An engine leaves the router before anything else, so that what is asked again goes elsewhere; then it is ended, which
fails the requests that it still held, and started anew. The replacement serves once it has the current weights. Only
the owner of the weights can tell when that is possible, by `give_weights`; where it is not, the engine waits for the
next update, in which it takes part like all others.

While the owner updates weights or has the engines' devices, between `hold` and `let_go`, nothing is started and nobody
joins.
"""

from __future__ import annotations

import logging
import threading
import time
import urllib.error
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from http.client import HTTPException
from typing import Protocol

from slime_retool.background import in_background
from slime_retool.engine.process import ServerError, answers, direct
from slime_retool.engine.router import RouterProcess
from slime_retool.errors import SlimeRetoolError, TrainerDied, WeightUpdateError

logger = logging.getLogger(__name__)
THREAD = "engine-upkeep"

LOOK_SECONDS = 1.0
"""Between two looks at all processes."""
PROBE_SECONDS = 10.0
"""Between the beginnings of two probes of one engine, each of which may take --engine-hang-timeout."""
PROBE_GRACE = 5.0
"""How much longer than the engine itself a probe waits for its answer."""
ANSWER_SECONDS = 20.0
"""For a paused engine to answer a question that its scheduler takes part in."""
LAST_WORDS_SECONDS = 15.0
"""For the end of a process to be known once its server refuses connections."""


class EngineService(Protocol):
    """What a client of the engines may know of them. For any thread."""

    @property
    def url(self) -> str:
        """The router's."""
        ...

    @property
    def addresses(self) -> Sequence[str | None]:
        """URL of each engine, by number; None where it does not serve."""
        ...

    @property
    def faults(self) -> int:
        """Engines and routers that have left so far, each counted when it has left.

        Whoever reads this, then `url` or `addresses`, and sees it grow after a failure knows whose failure it was.
        """
        ...

    @property
    def serving(self) -> bool:
        """Whether any engine serves."""
        ...

    def look(self) -> None:
        """Look at all processes now, and let those that died leave.

        Raises ServerError when that ends the run, and TrainerDied where no engine serves and none can get weights.
        """
        ...


class EngineHost(Protocol):
    """One engine's process, or a server of others."""

    name: str
    replaceable: bool

    def start(self) -> str:
        """End what is there, start anew, wait until it is healthy. Returns the URL; raises a SlimeRetoolError."""
        ...

    def ended(self) -> str | None:
        """How the process ended, in words that follow its name; None while it lives."""
        ...

    def stop(self) -> None:
        """End the process now; never raises."""
        ...

    def log_tail(self) -> str:
        """The last lines that it wrote; never raises."""
        ...


class State(Enum):
    """What an engine is doing."""

    OUT = "has ended, and is to be started"
    STARTING = "starts"
    UP = "has started and waits for weights"
    SERVING = "is in the router"


@dataclass(slots=True)
class _Probe:
    """A question whether an engine still generates. One that a `hold` began or ended in proves nothing."""

    answer: Future[bool]
    begun: float
    holds: int


@dataclass(slots=True)
class _Watch:
    """The last probe of one server."""

    probe: _Probe | None = None


@dataclass(slots=True)
class _Member:
    host: EngineHost
    url: str
    state: State
    starting: Future[str] | None = None
    watch: _Watch = field(default_factory=_Watch)


class Upkeep:
    """The engines behind one router, by number. An `EngineService`; the other methods are for one owner's thread."""

    def __init__(
        self,
        hosts: Sequence[EngineHost],
        urls: Sequence[str],
        *,
        make_router: Callable[[list[str]], RouterProcess],
        give_weights: Callable[[Mapping[int, str]], bool],
        max_restarts: int,
        hang_seconds: float,
    ) -> None:
        """Start the router in front of running engines, and watch all until `close`.

        Args:
            make_router: starts one in front of these URLs.
            give_weights: put the current weights into these engines ({number: URL}). False where that cannot be now;
                WeightUpdateError where an engine does not take them. TrainerDied is raised where somebody looks and no
                other engine serves: whoever waits for one does not ask the trainers.
            max_restarts: of all engines together, and of the router.
            hang_seconds: without any token, while asked for some, before an engine counts as hung.
        """
        self._members = [_Member(host, url, State.SERVING) for host, url in zip(hosts, urls, strict=True)]
        self._make_router, self._give_weights = make_router, give_weights
        self._max_restarts, self._hang_seconds = max_restarts, hang_seconds
        self._changed = threading.Condition()
        self._held = self._closed = False
        self._holds = self._faults = self._restarts = self._router_restarts = 0
        self._failure: ServerError | None = None
        self._trainer_died: TrainerDied | None = None
        """Why engines that have started got no weights."""
        self._router, self._router_watch = make_router(list(urls)), _Watch()
        self._thread = threading.Thread(target=self._watch, name=THREAD, daemon=True)
        self._thread.start()

    # EngineService

    @property
    def url(self) -> str:
        return self._router.url

    @property
    def addresses(self) -> list[str | None]:
        return [member.url if member.state is State.SERVING else None for member in self._members]

    @property
    def faults(self) -> int:
        return self._faults

    @property
    def serving(self) -> bool:
        return self.num_serving > 0

    @property
    def num_serving(self) -> int:
        """Engines that serve."""
        return sum(member.state is State.SERVING for member in self._members)

    @property
    def restarts(self) -> int:
        """Replacements of engines that were started so far."""
        return self._restarts

    def look(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._held or self._closed)
            self._look(closely=True)
            self._raise()
            self._raise_for_trainers()

    # The owner's

    def others_run(self, engines: Collection[int]) -> bool:
        """Whether any engine but these (numbers) serves or starts."""
        running = (State.STARTING, State.SERVING)
        return any(m.state in running and number not in engines for number, m in enumerate(self._members))

    def engines(self) -> dict[int, str]:
        """{number: URL} of all that have started, with or without the current weights."""
        with self._changed:
            up = (State.UP, State.SERVING)
            return {number: member.url for number, member in enumerate(self._members) if member.state in up}

    def check(self) -> None:
        """`look`, but inside of a hold, where only what ended the run before is raised."""
        with self._changed:
            if not self._held:
                self._look(closely=True)
            self._raise()
            self._raise_for_trainers()

    def hold(self, *, settle: bool = False) -> None:
        """Leave the engines to the owner, of which one at least has started. `settle`: none is still starting.

        Raises ServerError as `look` does.
        """
        with self._changed:
            if self._held:
                return
            self._look()
            while self._failure is None and (settle or not self.engines()) and (starting := self._starting()):
                starting.exception()
                self._look()
            self._raise()
            self._held, self._trainer_died = True, None
            self._holds += 1

    def let_go(self) -> None:
        """The engines that have started hold the current weights and generate: they serve, and are watched."""
        with self._changed:
            if not self._held:
                return
            self._held = False
            self._holds += 1
            self._guarded(self._resume)
            self._changed.notify_all()
            self._raise()

    def drop_dead(self, *, stuck: bool = True) -> bool:
        """Inside of a hold: let engines that died leave; where none has, also those that are `stuck`. True when there
        were some.

        Where no other is left the first of them is started again, and awaited. Raises as `look`.
        """
        with self._changed:
            assert self._held
            before = self._faults
            self._guarded(partial(self._check_all, closely=True))
            if stuck and self._faults == before:
                self._guarded(self._drop_stuck)
            if self._faults > before and not self.engines():
                self._guarded(self._start_one)
            self._raise()
            return self._faults > before

    @contextmanager
    def ends_stuck(self) -> Iterator[None]:
        """Inside of a hold, while trainers send weights: an engine that answers nothing for so long that it counts as
        hung is ended, so that nobody waits for it any more."""
        done = threading.Event()

        def end_if_stuck(member: _Member) -> None:
            while not done.wait(LOOK_SECONDS):
                if answers(f"{member.url}/health", self._hang_seconds):
                    continue
                if not done.is_set() and member.host.ended() is None:
                    logger.warning("%s answers nothing while it is given weights, and is ended", member.host.name)
                    member.host.stop()
                return

        for member in self._members:
            if member.state in (State.UP, State.SERVING) and member.host.replaceable:
                in_background(partial(end_if_stuck, member), THREAD)
        try:
            yield
        finally:
            done.set()

    def close(self) -> None:
        """Watch no more, and end the router; never raises. The engines are their owner's to end."""
        self._closed = True
        # Whoever holds the lock may wait for an engine that will never answer.
        if self._changed.acquire(timeout=LAST_WORDS_SECONDS):
            self._changed.notify_all()
            self._changed.release()
            self._thread.join(LAST_WORDS_SECONDS)
        self._router.stop()

    # Below here the lock is held, but in what `in_background` runs.

    def _watch(self) -> None:
        with self._changed:
            while not self._changed.wait_for(lambda: self._closed, LOOK_SECONDS):
                if not self._held:
                    self._look()

    def _raise(self) -> None:
        if self._failure is not None and not self._closed:
            raise ServerError(str(self._failure)) from self._failure

    def _raise_for_trainers(self) -> None:
        error, self._trainer_died = self._trainer_died, None
        if error is not None and not self.serving and not self._closed:
            raise error

    def _look(self, *, closely: bool = False) -> None:
        self._guarded(partial(self._check_all, closely=closely))
        if not self._held:
            self._guarded(self._join)

    def _guarded(self, action: Callable[[], None]) -> None:
        """What ends the run is kept, and raised where the run asks."""
        if self._failure is not None or self._closed:
            return
        try:
            action()
        except ServerError as error:
            self._failure = error
        except Exception as error:
            logger.exception("the upkeep of the engines failed")
            self._failure = ServerError(f"the upkeep of the engines failed: {type(error).__name__}: {error}")

    def _check_all(self, *, closely: bool) -> None:
        """`closely`: something failed, so that servers are asked whether they take requests at all."""
        for member in self._members:
            if member.state is State.STARTING:
                self._finish_start(member)
            elif member.state in (State.UP, State.SERVING) and (how := self._problem(member, closely)):
                self._leave(member, how)
        alive = f"{self._router.url}/liveness"
        if self._router.alive and closely and _takes_requests(alive) is False:
            _within(LAST_WORDS_SECONDS, lambda: not self._router.alive)
            self._router.stop()
        elif self._router.alive and self._hangs(self._router_watch, alive):
            logger.warning("the router answers nothing (--engine-hang-timeout %g)", self._hang_seconds)
            self._router.stop()
        if self.serving and not self._router.alive:
            self._replace_router()

    def _drop_stuck(self) -> None:
        """Engines that answer nothing: they may wait for weights that nobody sends."""
        asked = [
            (member, in_background(partial(answers, f"{member.url}/server_info", ANSWER_SECONDS), THREAD))
            for member in self._members
            if member.state in (State.UP, State.SERVING)
        ]
        for member, answer in asked:
            if not answer.result():
                self._leave(member, f"answers nothing for {ANSWER_SECONDS:g} s")

    def _problem(self, member: _Member, closely: bool) -> str | None:
        """What is wrong with a started engine, in words that follow its name."""
        how, suspicion = member.host.ended(), None
        takes = _takes_requests(f"{member.url}/health") if how is None and closely else True
        if takes is False:
            suspicion = "refuses connections"
        # Asked for one token where it generates nothing else.
        elif how is None and member.state is State.SERVING and self._hangs(
            member.watch, f"{member.url}/health_generate"
        ):
            suspicion = f"generates nothing, although asked to (--engine-hang-timeout {self._hang_seconds:g})"
        if suspicion is not None or not takes:  # one that dies may neither answer nor have ended yet
            _within(LAST_WORDS_SECONDS, lambda: member.host.ended() is not None)
            how = member.host.ended()
        return how or suspicion

    def _hangs(self, watch: _Watch, url: str) -> bool:
        """Whether the last probe, if it has ended, found it so; starts the next one in time."""
        probe, now = watch.probe, time.monotonic()
        if self._held or (probe is not None and not probe.answer.done()):
            return False
        if probe is not None and probe.holds == self._holds:
            if not probe.answer.result():
                watch.probe = None
                return True
            if now - probe.begun < PROBE_SECONDS:
                return False
        patience = self._hang_seconds + PROBE_GRACE
        watch.probe = _Probe(in_background(lambda: answers(url, patience), THREAD), now, self._holds)
        return False

    def _leave(self, member: _Member, how: str) -> None:
        """Out of the router, ended, and started anew, if that may be."""
        tail = member.host.log_tail()
        logger.warning("%s %s%s", member.host.name, how, f"; the end of its log:\n{tail}" if tail else "")
        if member.state is State.SERVING and self._router.alive:
            try:
                self._router.remove(member.url)
            except ServerError as error:
                logger.warning("%s", error)
                self._router.stop()
        member.state, member.watch.probe = State.OUT, None
        member.host.stop()
        self._faults += 1
        if not member.host.replaceable:
            if not self.engines():
                raise ServerError(f"{member.host.name} {how}, and no other engine is left")
        elif self._restarts >= self._max_restarts:
            raise ServerError(
                f"{member.host.name} {how}, and --max-engine-restarts {self._max_restarts} allows no further "
                "replacement; the end of its log (logs/engine_N.log in --output-dir) may say why"
            )
        elif not self._held:
            self._start(member)

    def _start(self, member: _Member) -> None:
        self._restarts += 1
        logger.info("a replacement of %s starts (%d of %d)", member.host.name, self._restarts, self._max_restarts)
        member.state, member.starting = State.STARTING, in_background(member.host.start, THREAD)

    def _start_one(self) -> None:
        for member in self._members:
            while member.state is State.OUT and member.host.replaceable:
                self._start(member)
                assert member.starting is not None
                member.starting.exception()
                self._finish_start(member)
            if member.state is State.UP:
                return

    def _starting(self) -> Future[str] | None:
        return next((member.starting for member in self._members if member.state is State.STARTING), None)

    def _finish_start(self, member: _Member) -> None:
        assert member.starting is not None
        if not member.starting.done():
            return
        try:
            member.url, member.state = member.starting.result(), State.UP
        except SlimeRetoolError as error:
            # The rest is the end of its log.
            self._leave(member, f"did not start again ({str(error).partition('; end of ')[0]})")

    def _join(self) -> None:
        """Give those that have started the current weights, where that can be now, and take them in."""
        up = {number: member for number, member in enumerate(self._members) if member.state is State.UP}
        if not up:
            return
        try:
            given = self._give_weights({number: member.url for number, member in up.items()})
        except TrainerDied as error:
            self._trainer_died = error
            return
        except WeightUpdateError as error:
            for member in up.values():
                self._leave(member, f"did not take the current weights ({error})")
            return
        for member in up.values() if given else ():
            self._take_in(member)

    def _resume(self) -> None:
        for member in self._members:
            if member.state is State.UP:
                self._take_in(member)
            elif member.state is State.OUT and member.host.replaceable:
                self._start(member)
        if self.serving and not self._router.alive:
            self._replace_router()

    def _take_in(self, member: _Member) -> None:
        try:
            if self._router.alive:
                self._router.add(member.url)
        except ServerError as error:
            logger.warning("%s", error)
            self._router.stop()
        if not self._router.alive:
            self._replace_router(member)
        member.state = State.SERVING
        logger.info("%s serves again, with the current weights", member.host.name)

    def _replace_router(self, joining: _Member | None = None) -> None:
        """Start another router, with another URL, in front of all that serve and the one that joins."""
        logger.warning("the router %s; another one starts", self._router.ending)
        self._router.stop()
        if self._router_restarts >= self._max_restarts:
            raise ServerError(
                f"the router {self._router.ending}, and --max-engine-restarts {self._max_restarts} allows no further "
                "replacement; the end of logs/router.log in --output-dir may say why"
            )
        self._router_restarts += 1
        self._router = self._make_router([m.url for m in self._members if m.state is State.SERVING or m is joining])
        self._router_watch.probe = None
        self._faults += 1


def _takes_requests(url: str) -> bool | None:
    """False where nobody listens, or a server that is going down; None where it does not answer in time."""
    for _ in range(3):
        try:
            with direct.open(url, timeout=2.0):
                return True
        except urllib.error.HTTPError as error:
            return error.code != 503
        except (OSError, HTTPException) as error:
            reason = error.reason if isinstance(error, urllib.error.URLError) else error
            if isinstance(reason, ConnectionRefusedError):
                return False
            if not isinstance(reason, ConnectionError):
                return None  # it may only be busy
    return False  # it closes every connection


def _within(seconds: float, true: Callable[[], bool]) -> None:
    """Wait until `true`, but no longer than this."""
    deadline = time.monotonic() + seconds
    while not true() and time.monotonic() < deadline:
        time.sleep(0.1)
