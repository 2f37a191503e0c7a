"""Start, watch and end a server process that never outlives its owner."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from http.client import HTTPException
from pathlib import Path
from typing import TypeVar

from slime_retool.engine import supervisor
from slime_retool.errors import SlimeRetoolError

P = TypeVar("P", bound="SupervisedProcess")

TAIL_LINES = 25
PORT_TRIES = 4
# What the log of a server says when another process took its port between our choice and its bind.
PORT_TAKEN = ("address already in use", "addrinuse", "port is not available", "is already in use")
PROXIES = ("http_proxy", "https_proxy", "ftp_proxy", "all_proxy")
"""Environment variables, in either case, that lead to a proxy; one does not reach addresses of a host or cluster."""

direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Reaches servers of the run, whatever proxy the environment names."""


class ServerError(SlimeRetoolError, RuntimeError):
    """A server did not start or ended by itself; the message holds the end of its log."""


@contextmanager
def held_ports(count: int, host: str = "127.0.0.1") -> Iterator[list[int]]:
    """`count` different free TCP ports outside of the range that the kernel gives to outgoing connections.

    Inside of the `with` block no other caller gets them, on this host, while a server that sets SO_REUSEADDR, as
    servers do, can listen on them. Such a server of someone else could too, so a start may still meet a taken port.
    """
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    candidates = range(min(20000, low - 1), low) if low > 12000 else range(61000, 65000)
    with ExitStack() as held:
        ports: list[int] = []
        for port in random.SystemRandom().sample(candidates, min(len(candidates), count + 400)):
            holder = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
            held.enter_context(holder)
            try:
                holder.bind((host, port))
            except OSError:
                continue
            # Only now: two sockets that have the option when they bind, and do not listen, get the same port.
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            ports.append(port)
            if len(ports) == count:
                break
        else:
            raise ServerError(f"found only {len(ports)} of {count} free ports on {host}")
        yield ports


def answers(url: str, timeout: float = 2.0) -> bool:
    """Whether a GET of `url` is answered with 200."""
    try:
        with direct.open(url, timeout=timeout) as reply:
            return reply.status == 200
    except (OSError, ValueError, HTTPException):
        return False


class SupervisedProcess:
    """One command under a supervisor (`engine.supervisor`): own session, log file, ended with all its children.

    It ends at `stop`, at the end of a `with` block, and with this process, however that ends.
    """

    def __init__(
        self, command: list[str], *, log_path: Path, environment: Mapping[str, str], grace: float = 5.0
    ) -> None:
        """Start at once. `environment` is the whole environment, of which proxies are left out: a server speaks to
        servers of the run. `grace`: seconds between SIGTERM and SIGKILL."""
        self.log_path, self._grace = log_path, grace
        log_path.parent.mkdir(parents=True, exist_ok=True)
        read_end, self._lifeline = os.pipe()
        try:
            with open(log_path, "ab") as log:
                self._log_start = log.tell()
                self._process = subprocess.Popen(
                    [sys.executable, supervisor.__file__, str(read_end), str(grace), *command],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={name: value for name, value in environment.items() if name.lower() not in PROXIES},
                    pass_fds=(read_end,),
                    start_new_session=True,
                )
        except BaseException:
            os.close(self._lifeline)
            raise
        finally:
            os.close(read_end)
        self._stopped = False

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    @property
    def ending(self) -> str:
        """How the command ended, in words; for one that has."""
        status = self._process.returncode
        number = -status if status < 0 else status - 128  # the supervisor's own end, or what it says of the command's
        if number in {*signal.Signals}:
            return f"was ended by {signal.Signals(number).name}"
        return f"ended with status {status}"

    def log_tail(self) -> str:
        """The last lines that the server wrote; what an earlier one left in the same file is not among them."""
        with open(self.log_path, "rb") as log:
            log.seek(max(self._log_start, self.log_path.stat().st_size - 20_000))
            lines = log.read().decode("utf-8", "replace").splitlines()
        return "\n".join(lines[-TAIL_LINES:])

    def wait_until_ready(self, ready: Callable[[], bool], timeout: float, what: str) -> None:
        """Poll `ready` until it is true. Raises ServerError when the process ends before, or after `timeout` s."""
        deadline, problem = time.monotonic() + timeout, f"was not ready after {timeout:g} s"
        while self.alive:
            if ready():
                return
            if time.monotonic() > deadline:
                break
            time.sleep(0.2)
        else:
            problem = f"{self.ending} while starting"
        raise ServerError(f"{what} {problem}; end of {self.log_path}:\n{self.log_tail()}")

    def wait(self, timeout: float) -> int | None:
        """The exit status, when the command ends by itself within `timeout` seconds; else None."""
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None

    def stop(self) -> None:
        """End the server and every process it started; safe to call twice."""
        if self._stopped:
            return
        self._stopped = True
        self._process.terminate()
        try:
            self._process.wait(self._grace + 10.0)
        except subprocess.TimeoutExpired:
            self._process.kill()  # the kernel then kills the server, see engine.supervisor
            self._process.wait()
        os.close(self._lifeline)

    def __enter__(self: P) -> P:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()


def port_was_taken(error: ServerError) -> bool:
    """Whether a failed start is worth another try with another port."""
    text = str(error).lower()
    return any(words in text for words in PORT_TAKEN)


class Server(SupervisedProcess):
    """A supervised server on a free port of its own; base of the engine and the router."""

    host: str
    port: int

    def _start(
        self,
        what: str,
        command: Callable[[list[int]], list[str]],
        *,
        host: str,
        health_path: str,
        timeout: float,
        log_path: Path,
        environment: Mapping[str, str],
        grace: float,
        num_ports: int = 1,
    ) -> None:
        """Run `command(ports)`, which serves on the first of `num_ports` free ports, until `health_path` answers 200.

        Starts anew with other ports when another process took one in between. Raises ServerError, with the log's end,
        when the server dies or is not ready within `timeout` seconds.
        """
        self.host = host
        for attempt in range(PORT_TRIES):
            with held_ports(num_ports, host) as ports:
                self.port = ports[0]
                super().__init__(command(ports), log_path=log_path, environment=environment, grace=grace)
                try:
                    self.wait_until_ready(lambda: answers(f"{self.url}{health_path}"), timeout, what)
                    return
                except BaseException as error:
                    self.stop()
                    if attempt == PORT_TRIES - 1 or not (isinstance(error, ServerError) and port_was_taken(error)):
                        raise

    @property
    def url(self) -> str:
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"
