"""Who leaves, who is replaced and who serves, with small web servers as engines and a list as the router."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from slime_retool.engine import upkeep as module
from slime_retool.engine.process import ServerError
from slime_retool.engine.upkeep import Upkeep
from slime_retool.errors import TrainerDied, WeightUpdateError


class WebServer:
    """Answers each path of `status` so, others with 200; None: not before `released`, with `late`."""

    def __init__(self) -> None:
        self.status: dict[str, int | None] = {}
        self.late = 200
        self.asked: list[str] = []
        self.released = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.asked.append(self.path)
                if (status := outer.status.get(self.path, 200)) is None:
                    outer.released.wait(60)
                    status = outer.late
                self.send_response(status)
                self.end_headers()

            def log_message(self, *_: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def close(self) -> None:
        self.released.set()
        self.server.shutdown()
        self.server.server_close()


class Engine:
    """An `EngineHost`. `dead`: how it ended."""

    replaceable = True

    def __init__(self, number: int, events: list[str]) -> None:
        self.name, self.events = f"engine {number}", events
        self.dead: str | None = None
        self.fails = 0
        self.may_start = threading.Event()
        self.may_start.set()
        self.server: WebServer | None = None
        self.start()
        events.clear()

    def start(self) -> str:
        assert self.may_start.wait(60)
        self.events.append(f"{self.name} starts")
        if self.fails:
            self.fails -= 1
            raise ServerError("no room")
        self.dead, self.server = None, WebServer()
        self.url, self.status = self.server.url, self.server.status
        return self.url

    def ended(self) -> str | None:
        return self.dead

    def stop(self) -> None:
        self.events.append(f"{self.name} stops")
        self.close()

    def close(self) -> None:
        server, self.server = self.server, None
        if server is not None:
            server.close()

    def log_tail(self) -> str:
        return "last words" if self.dead else ""


class Router:
    """Stands for `RouterProcess`."""

    def __init__(self, events: list[str], urls: list[str]) -> None:
        self.server = WebServer()
        self.url, self.ending, self.alive = self.server.url, "was ended by SIGSEGV", True
        self.events, self.urls = events, list(urls)

    def add(self, url: str) -> None:
        self.urls.append(url)
        self.events.append("router takes")

    def remove(self, url: str) -> None:
        self.events.append("router drops")
        self.urls.remove(url)

    def stop(self) -> None:
        if self.alive:
            self.server.close()
        self.alive = False


class Parts:
    """Two engines (or as many as asked for) and what was done with them, in `events`."""

    def __init__(self, count: int = 2) -> None:
        self.events: list[str] = []
        self.engines = [Engine(number, self.events) for number in range(count)]
        self.routers: list[Router] = []
        self.weights: Callable[[Mapping[int, str]], bool] = lambda engines: True

    def make_router(self, urls: list[str]) -> Router:
        self.routers.append(Router(self.events, urls))
        return self.routers[-1]

    def give_weights(self, engines: Mapping[int, str]) -> bool:
        self.events.append(f"weights for {sorted(engines)}")
        return self.weights(engines)

    @property
    def router(self) -> Router:
        return self.routers[-1]

    @property
    def serving(self) -> list[str]:
        """Names of the engines in the router."""
        return sorted(engine.name for engine in self.engines if engine.url in self.router.urls)


@contextmanager
def kept(parts: Parts, *, max_restarts: int = 3, hang_seconds: float = 60.0) -> Iterator[Upkeep]:
    upkeep = Upkeep(
        parts.engines, [engine.url for engine in parts.engines], make_router=parts.make_router,
        give_weights=parts.give_weights, max_restarts=max_restarts, hang_seconds=hang_seconds,
    )  # fmt: skip
    try:
        yield upkeep
    finally:
        upkeep.close()
        for engine in parts.engines:
            engine.close()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (
        ("LOOK_SECONDS", 0.02), ("PROBE_SECONDS", 0.05), ("PROBE_GRACE", 0.0), ("LAST_WORDS_SECONDS", 0.2),
        ("ANSWER_SECONDS", 10.0),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, seconds)


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.005)


def test_an_engine_that_died_leaves_the_router_first_and_its_replacement_joins_with_weights(caplog):
    parts = Parts()
    with kept(parts) as upkeep:
        old = parts.engines[1].url
        parts.engines[1].dead = "was ended by SIGKILL"
        until(lambda: parts.events[-1:] == ["router takes"])
        assert parts.events == [
            "router drops", "engine 1 stops", "engine 1 starts", "weights for [1]", "router takes",
        ]  # fmt: skip
        assert parts.serving == ["engine 0", "engine 1"] and old not in parts.router.urls
        assert upkeep.engines() == {0: parts.engines[0].url, 1: parts.engines[1].url}
        assert (upkeep.faults, upkeep.restarts, upkeep.num_serving) == (1, 1, 2)
    [warning] = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warning == "engine 1 was ended by SIGKILL; the end of its log:\nlast words"


def test_while_a_replacement_starts_the_others_serve_and_with_none_nobody_does():
    parts = Parts()
    for engine in parts.engines:
        engine.may_start.clear()
    with kept(parts) as upkeep:
        parts.engines[1].dead = "ended with status 1"
        upkeep.look()
        assert parts.serving == ["engine 0"] and upkeep.serving and upkeep.engines() == {0: parts.engines[0].url}
        assert upkeep.others_run({0: ""}) and upkeep.others_run({1: ""})
        parts.engines[0].dead = "ended with status 1"
        upkeep.look()
        assert not upkeep.serving and upkeep.engines() == {} and upkeep.faults == 2
        for engine in parts.engines:
            engine.may_start.set()
        until(lambda: upkeep.num_serving == 2)
        assert not upkeep.others_run({0: "", 1: ""})


@pytest.mark.parametrize("status", [None, 503], ids=["silent", "says so"])
def test_an_engine_that_generates_nothing_is_ended_and_replaced(status: int | None, caplog):
    parts = Parts()
    with kept(parts, hang_seconds=3.0) as upkeep:
        parts.engines[0].status["/health_generate"] = status
        until(lambda: upkeep.restarts >= 1 and upkeep.num_serving == 2)
        assert parts.events[:2] == ["router drops", "engine 0 stops"]
    assert "engine 0 generates nothing, although asked to (--engine-hang-timeout 3)" in caplog.text


def test_a_probe_that_a_hold_cut_short_proves_nothing():
    """A paused engine answers no probe."""
    parts = Parts(1)
    server = parts.engines[0].server
    assert server is not None
    server.status["/health_generate"], server.late = None, 503
    with kept(parts) as upkeep:
        until(lambda: "/health_generate" in server.asked)
        upkeep.hold()
        server.released.set()
        until(lambda: upkeep._members[0].watch.probe.answer.done())
        server.status["/health_generate"] = 200
        upkeep.let_go()
        for _ in range(10):
            upkeep.look()
            time.sleep(0.02)
        assert upkeep.faults == 0


def test_an_engine_that_refuses_connections_leaves_only_once_something_failed(caplog):
    parts = Parts()
    with kept(parts) as upkeep:
        with upkeep._changed:  # before a probe finds it closed
            parts.engines[1].close()
            upkeep.look()
        assert upkeep.faults == 1
    assert "engine 1 refuses connections" in caplog.text


def test_an_engine_that_refuses_connections_since_it_dies_is_told_by_its_end(monkeypatch, caplog):
    parts = Parts()
    with kept(parts) as upkeep:
        monkeypatch.setattr(module, "LAST_WORDS_SECONDS", 60.0)
        parts.engines[1].close()
        threading.Timer(0.3, setattr, (parts.engines[1], "dead", "was ended by SIGKILL")).start()
        upkeep.look()
        assert upkeep.faults == 1
    assert "engine 1 was ended by SIGKILL" in caplog.text and "refuses" not in caplog.text


def test_an_engine_is_asked_for_a_token_no_more_often_than_it_should_be(monkeypatch):
    parts = Parts(1)
    server = parts.engines[0].server
    assert server is not None
    with kept(parts) as upkeep:
        until(lambda: server.asked.count("/health_generate") > 2)  # every twentieth of a second here
        monkeypatch.setattr(module, "PROBE_SECONDS", 3600.0)
        upkeep.look()
        probe = upkeep._members[0].watch.probe  # which had begun
        assert probe is not None and probe.answer.result(60)
        asked = server.asked.count("/health_generate")
        for _ in range(10):
            upkeep.look()
            time.sleep(0.02)
        assert server.asked.count("/health_generate") == asked


@pytest.mark.parametrize(("status", "faults"), [(503, 1), (500, 0)], ids=["going down", "some error"])
def test_an_engine_that_says_that_it_goes_down_leaves(status: int, faults: int):
    parts = Parts()
    with kept(parts) as upkeep:
        parts.engines[1].status["/health"] = status
        upkeep.look()
        assert upkeep.faults == faults


def test_an_engine_that_is_dying_leaves_although_its_server_is_only_silent(monkeypatch):
    """Its sockets are open until the kernel has taken all of it down."""
    parts = Parts()
    with kept(parts) as upkeep:
        monkeypatch.setattr(module, "LAST_WORDS_SECONDS", 60.0)
        silent = parts.engines[1].url
        monkeypatch.setattr(module, "_takes_requests", lambda url: None if url.startswith(silent) else True)
        threading.Timer(0.3, setattr, (parts.engines[1], "dead", "was ended by SIGKILL")).start()
        upkeep.look()
        assert upkeep.faults == 1


def test_a_server_that_closes_every_connection_takes_no_requests():
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def close_all() -> None:
            for _ in range(3):
                listener.accept()[0].close()

        thread = threading.Thread(target=close_all)
        thread.start()
        assert module._takes_requests(f"http://127.0.0.1:{listener.getsockname()[1]}/health") is False
        thread.join()


def test_an_engine_that_takes_long_to_answer_stays():
    parts = Parts(1)
    with kept(parts) as upkeep:
        parts.engines[0].status["/health"] = None
        threading.Timer(0.3, parts.engines[0].server.released.set).start()
        upkeep.look()
        assert upkeep.faults == 0


def test_a_replacement_that_cannot_have_weights_now_serves_after_the_next_update():
    parts = Parts()
    parts.weights = lambda engines: False
    with kept(parts) as upkeep:
        parts.engines[1].dead = "ended with status 1"
        until(lambda: 1 in upkeep.engines() and upkeep.restarts == 1)
        upkeep.look()
        assert parts.serving == ["engine 0"]
        upkeep.hold()
        assert upkeep.engines() == {0: parts.engines[0].url, 1: parts.engines[1].url}
        upkeep.let_go()
        assert parts.serving == ["engine 0", "engine 1"]


def test_a_replacement_that_does_not_take_the_weights_never_serves():
    parts = Parts()
    answers = iter([WeightUpdateError("other values"), True])

    def give(engines: Mapping[int, str]) -> bool:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    parts.weights = give
    with kept(parts) as upkeep:
        parts.engines[1].dead = "ended with status 1"
        upkeep.look()
        until(lambda: upkeep.num_serving == 2)
        assert upkeep.restarts == 2 and parts.events.count("router takes") == 1
        assert parts.events.index("router takes") == len(parts.events) - 1


def test_a_start_that_fails_is_tried_again_as_often_as_restarts_are_allowed():
    parts = Parts()
    parts.engines[1].fails = 1
    with kept(parts, max_restarts=2) as upkeep:
        parts.engines[1].dead = "ended with status 1"
        upkeep.look()
        until(lambda: upkeep.num_serving == 2)
        parts.engines[1].dead = "ended with status 1"
        with pytest.raises(ServerError, match="engine 1 ended with status 1, and --max-engine-restarts 2 allows no"):
            upkeep.look()
        with pytest.raises(ServerError, match="allows no further replacement"):
            upkeep.hold()
        with pytest.raises(ServerError, match="allows no further replacement"):
            upkeep.check()


def test_inside_of_a_hold_nobody_starts_or_joins_and_looks_wait():
    parts = Parts()
    with kept(parts) as upkeep, ThreadPoolExecutor(1) as pool:
        upkeep.hold()
        upkeep.hold()  # again does nothing
        assert not upkeep.drop_dead()
        parts.engines[1].dead = "was ended by SIGKILL"
        look = pool.submit(upkeep.look)
        upkeep.check()
        time.sleep(0.1)
        assert not look.done() and parts.events == []
        assert upkeep.drop_dead() and not upkeep.drop_dead()
        assert parts.events == ["router drops", "engine 1 stops"] and upkeep.engines() == {0: parts.engines[0].url}
        upkeep.let_go()
        look.result(60)
        until(lambda: upkeep.num_serving == 2)


def test_the_last_engine_that_dies_in_a_hold_is_started_at_once_and_awaited():
    parts = Parts()
    parts.engines[0].fails = 1
    with kept(parts) as upkeep:
        upkeep.hold()
        for engine in parts.engines:
            engine.dead = "was ended by SIGKILL"
        assert upkeep.drop_dead()
        assert upkeep.engines() == {0: parts.engines[0].url} and upkeep.restarts == 2
        upkeep.let_go()
        until(lambda: upkeep.num_serving == 2)


def test_an_engine_that_answers_nothing_in_a_failed_update_is_dropped():
    parts = Parts()
    with kept(parts) as upkeep:
        upkeep.hold()
        parts.engines[1].status["/server_info"] = None
        assert upkeep.drop_dead() and upkeep.engines() == {0: parts.engines[0].url}


def test_an_engine_that_answers_nothing_while_it_is_given_weights_is_ended(caplog):
    parts = Parts()
    with kept(parts, hang_seconds=3.0) as upkeep:
        upkeep.hold()
        with upkeep.ends_stuck():
            parts.engines[1].status["/health"] = None
            until(lambda: "engine 1 stops" in parts.events)
            parts.engines[0].dead = "was ended by SIGKILL"  # nobody has to end that one
            parts.engines[0].close()
            time.sleep(0.2)
        assert parts.events == ["engine 1 stops"]
        assert caplog.text.count("answers nothing while it is given weights") == 1
        parts.events.clear()
        time.sleep(0.1)
        assert parts.events == []


def test_trainers_that_died_are_told_where_nobody_else_serves(caplog):
    """Whoever waits for an engine asks no trainer, and would wait for ever."""
    parts = Parts()

    def died(engines: Mapping[int, str]) -> bool:
        raise TrainerDied("a trainer was ended by SIGKILL")

    parts.weights = died
    with kept(parts) as upkeep:
        parts.engines[1].dead = "ended with status 1"
        upkeep.look()
        until(lambda: parts.events[-1] == "weights for [1]")
        upkeep.look()  # the other one serves
        parts.engines[0].dead = "ended with status 1"
        with pytest.raises(TrainerDied, match="SIGKILL"):
            until(lambda: upkeep.look() is not None)
        upkeep.hold()
        parts.weights = lambda engines: True
        upkeep.let_go()
        upkeep.look()
        assert upkeep.num_serving > 0


def test_a_router_that_takes_no_replacement_in_is_replaced():
    parts = Parts()
    with kept(parts) as upkeep:
        first = parts.router

        def add(url: str) -> None:
            raise ServerError("the router does not answer POST /workers: timed out")

        first.add = add
        parts.engines[1].dead = "ended with status 1"
        upkeep.look()
        until(lambda: upkeep.num_serving == 2)
        assert len(parts.routers) == 2 and not first.alive and sorted(parts.serving) == ["engine 0", "engine 1"]


def test_a_hold_that_settles_waits_for_those_that_start():
    parts = Parts()
    parts.weights = lambda engines: False
    parts.engines[1].fails = 1
    with kept(parts) as upkeep:
        parts.engines[1].dead = "ended with status 1"
        parts.engines[1].may_start.clear()
        upkeep.look()
        threading.Timer(0.2, parts.engines[1].may_start.set).start()
        upkeep.hold(settle=True)
        assert 1 in upkeep.engines() and upkeep.restarts == 2


def test_a_hold_without_any_engine_waits_for_the_first():
    parts = Parts()
    parts.engines[1].fails = 1
    with kept(parts) as upkeep:
        for engine in parts.engines:
            engine.dead = "ended with status 1"
            engine.may_start.clear()
        upkeep.look()
        threading.Timer(0.2, parts.engines[0].may_start.set).start()
        upkeep.hold()
        assert upkeep.engines() == {0: parts.engines[0].url}
        parts.engines[1].may_start.set()


def test_a_router_that_died_is_replaced_in_front_of_those_that_serve(caplog):
    parts = Parts()
    parts.engines[1].may_start.clear()
    with kept(parts, max_restarts=1) as upkeep:
        parts.engines[1].dead = "ended with status 1"
        upkeep.look()
        parts.router.alive = False
        upkeep.look()
        assert len(parts.routers) == 2 and parts.router.urls == [parts.engines[0].url]
        assert upkeep.url == parts.router.url and upkeep.faults == 2
        parts.engines[1].may_start.set()
        until(lambda: parts.serving == ["engine 0", "engine 1"])
        parts.router.alive = False
        with pytest.raises(ServerError, match="the router was ended by SIGSEGV, and --max-engine-restarts 1 allows"):
            upkeep.look()


def test_a_router_that_refuses_connections_is_replaced_before_its_end_is_known():
    """Its supervisor outlives it by a moment."""
    parts = Parts(1)
    with kept(parts) as upkeep:
        parts.router.server.close()
        parts.router.stop = lambda: setattr(parts.routers[0], "alive", False)
        upkeep.look()
        assert len(parts.routers) == 2 and upkeep.url == parts.router.url and parts.serving == ["engine 0"]


def test_a_router_that_answers_nothing_is_replaced():
    parts = Parts(1)
    with kept(parts, hang_seconds=3.0) as upkeep:
        parts.router.server.status["/liveness"] = None
        until(lambda: upkeep.url == parts.routers[-1].url and len(parts.routers) == 2)
        assert not parts.routers[0].alive and parts.serving == ["engine 0"]


def test_a_router_without_engines_is_replaced_with_the_first_that_serves():
    parts = Parts(1)
    parts.engines[0].may_start.clear()
    with kept(parts) as upkeep:
        parts.engines[0].dead = "ended with status 1"
        upkeep.look()
        parts.router.alive = False
        upkeep.look()
        assert len(parts.routers) == 1
        parts.engines[0].may_start.set()
        until(lambda: upkeep.serving)
        assert len(parts.routers) == 2 and parts.router.urls == [parts.engines[0].url]


def test_an_engine_of_others_leaves_for_good_and_the_last_one_ends_the_run():
    parts = Parts()
    for engine in parts.engines:
        engine.replaceable = False
    with kept(parts) as upkeep:
        with upkeep._changed:  # before a probe finds it closed
            parts.engines[0].close()
            upkeep.look()
        upkeep.hold()
        upkeep.let_go()
        assert parts.serving == ["engine 1"] and upkeep.restarts == 0
        with upkeep._changed:
            parts.engines[1].close()
            with pytest.raises(ServerError, match="engine 1 refuses connections, and no other engine is left"):
                upkeep.look()


def test_whoever_waits_for_the_end_of_a_hold_goes_on_when_all_is_over():
    parts = Parts(1)
    with ThreadPoolExecutor(1) as pool:
        with kept(parts) as upkeep:
            upkeep.hold()
            look = pool.submit(upkeep.look)
        look.result(60)
    assert not parts.router.alive
