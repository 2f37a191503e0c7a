"""The event loop's end of the broker's socket: one write and one future per call, no threads."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
from typing import Any

from slime_retool.sandbox.boot import command
from slime_retool.sandbox.broker import cgroup, trees
from slime_retool.sandbox.broker.started import StartedCalls
from slime_retool.sandbox.child.environment import package_folders
from slime_retool.sandbox.child.namespaces import WORK
from slime_retool.sandbox.child.syscalls import AUDIT_ARCH, MACHINE
from slime_retool.sandbox.host.policy import SandboxPolicy, SandboxUnavailable
from slime_retool.sandbox.wire import Frames, pack

logger = logging.getLogger(__name__)

_START_GRACE = 30.0
_EXIT_SECONDS = 10.0
_CHUNK = 1 << 16
_MESSAGES_AT_ONCE = 8
"""In each direction, so that the event loop has other work between them."""

_ADVICE = {
    "user and other namespaces": (
        "Allow user namespaces (sysctl user.max_user_namespaces above 0; "
        "on Debian kernel.unprivileged_userns_clone=1, on Ubuntu kernel.apparmor_restrict_unprivileged_userns=0; "
        "in Docker --security-opt seccomp=unconfined and --security-opt apparmor=unconfined), "
        "or choose isolation 'landlock', which needs no namespaces."
    ),
    "landlock": (
        "Landlock needs Linux 5.13 (6.2 for isolation 'landlock') and 'landlock' in the kernel's lsm= list; "
        "in a container the host's kernel counts. "
        "Isolation 'none' has to be asked for by name and is no security boundary."
    ),
    "seccomp": "The kernel needs CONFIG_SECCOMP_FILTER and its container must allow prctl.",
    "setuid": "Run as root with CAP_SETUID and CAP_SETGID, or as an ordinary user.",
    "environment": (
        "The sandbox's packages must import in a bare interpreter: "
        "install them in the environment that runs the sandbox, readable by all users, "
        "or take them out of SandboxPolicy.packages."
    ),
}
_ADVICE["paths"] = f"Install the interpreter and its packages outside {WORK}, or choose isolation 'landlock'."
_ADVICE["mount namespace"] = _ADVICE["user and other namespaces"]


def _environment(private_root: bool) -> dict[str, str]:
    """All the variables that the code can see; none is the caller's, but for two that let libraries load at all."""
    kept = ("LD_LIBRARY_PATH", "OPENBLAS_CORETYPE")
    return {
        **{name: os.environ[name] for name in kept if name in os.environ},
        **{f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL", "NUMEXPR")},
        **({"HOME": WORK, "TMPDIR": WORK} if private_root else {}),
        "PATH": "/usr/bin:/bin",
        "LANG": "C.UTF-8",
        "USER": "sandbox",
        "MPLBACKEND": "Agg",
        "MALLOC_ARENA_MAX": "2",
        "PYTHONHASHSEED": "0",
    }


class NotStarted(Exception):
    """The broker ended before the call began: another one can run it."""


class JailClient(asyncio.BufferedProtocol):
    """Starts a broker and talks to it. `off`: layers to leave out, for tests that show what each one stops."""

    _loop: asyncio.AbstractEventLoop
    """The one that it was started in."""

    def __init__(self, policy: SandboxPolicy, off: frozenset[str] = frozenset()) -> None:
        self._policy, self._off = policy, off
        self._private_root = policy.isolation == "namespaces" and "mount" not in off
        self._folder: str | None = None
        self._cgroup: list[str] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._transport: asyncio.Transport | None = None
        self._ready: asyncio.Future[None] | None = None
        self._waiting: dict[int, tuple[asyncio.Future[dict[str, Any]], str | None]] = {}
        """Futures of calls, and their sessions."""
        self.sessions: set[str] = set()
        """Those that have begun here: they end with the broker."""
        self._started = StartedCalls.create()
        """Those that run, or have run, by the broker's own note: it outlives the broker."""
        self._received = Frames()
        self._buffer = memoryview(bytearray(_CHUNK))
        self._to_send: collections.deque[bytes] = collections.deque()
        self._reading = self._writing = False
        self._ending: asyncio.Task[None] | None = None
        self._count = 0
        self.failure: str | None = None
        self.alive = False

    async def start(self) -> JailClient:
        """Itself, when calls can be made. Raises SandboxUnavailable."""
        known = MACHINE in AUDIT_ARCH or self._policy.isolation == "none"
        if not sys.platform.startswith("linux") or not known:
            raise SandboxUnavailable(
                f"isolation {self._policy.isolation!r} needs Linux on x86_64 or aarch64, "
                f"this is {sys.platform} on {MACHINE}; "
                "run the sandbox on such a machine (`slime-retool sandbox serve`) and pass its URL"
            )
        config = self._config()
        ours, theirs = socket.socketpair()
        start = command("broker.broker", theirs.fileno())
        try:
            with theirs:
                self._process = subprocess.Popen(
                    start,
                    pass_fds=[theirs.fileno(), self._started.fd],
                    cwd="/",
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    start_new_session=True,
                    env=(dict(os.environ) if "environment" in self._off else {}) | _environment(self._private_root),
                )
        except OSError as error:
            ours.close()
            await self.close()
            raise SandboxUnavailable(f"cannot start the sandbox's broker with {start[0]}: {error}") from error
        ours.setblocking(False)
        self._loop = asyncio.get_running_loop()
        self._ready = self._loop.create_future()
        await self._loop.create_connection(lambda: self, sock=ours)
        self._write(config)
        try:
            await asyncio.wait_for(self._ready, self._policy.startup_timeout + _START_GRACE)
        except BaseException as error:
            await self.close()
            if isinstance(error, asyncio.TimeoutError):
                raise SandboxUnavailable("the sandbox's broker did not answer") from error
            raise
        self.alive = True
        return self

    def _config(self) -> dict[str, Any]:
        policy = self._policy
        bare = policy.isolation == "none"
        try:
            packages = package_folders(policy.packages)
        except LookupError as error:
            if not bare:
                raise SandboxUnavailable(
                    f"the sandbox's package {error} is not installed for {sys.executable}; install it or take it out "
                    "of SandboxPolicy.packages"
                ) from error
            packages = {}
        links, work = (None, None) if self._private_root else self._make_folder(packages)
        path = [] if links is None else [links]
        if bare:
            # Start-up skips `site` (and the .pth files it runs), so where packages are installed is named.
            path = sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
        modules = [name.removesuffix(".py") for name in packages if name.removesuffix(".py").isidentifier()]
        preload = [name for name in (name.replace("-", "_") for name in policy.packages) if name in modules]
        zygote = {"isolation": policy.isolation, "packages": packages, "path": path, "work": work}
        return {
            "zygote": zygote | {"off": sorted(self._off)},
            "kinds": {"plain": []} | ({"packages": preload} if preload else {}),
            "heavy": modules,
            "pool": min(policy.concurrency, policy.prefork),
            "limits": dataclasses.asdict(policy),
            "folder": self._folder,
            "started": self._started.fd,
            "name": f"slime-retool-sandbox-{secrets.token_hex(8)}",
        }

    def _make_folder(self, packages: dict[str, str]) -> tuple[str, str]:
        """Without a root of its own: links to the packages, and a folder for the calls' working folders."""
        try:
            self._folder = tempfile.mkdtemp(prefix="slime-retool-sandbox-")
        except OSError as error:
            what = f"the sandbox needs a folder under {tempfile.gettempdir()}: {error}; set TMPDIR"
            raise SandboxUnavailable(what) from error
        os.chmod(self._folder, 0o711)
        links, work, trash = (os.path.join(self._folder, name) for name in ("packages", trees.WORK, trees.TRASH))
        for path, mode in ((links, 0o755), (work, 0o711), (trash, 0o700)):
            os.mkdir(path, mode)
        for name, path in packages.items():
            os.symlink(path, os.path.join(links, name))
        return links, work

    async def call(self, message: dict[str, Any]) -> dict[str, Any]:
        """The broker's answer to `message`, which gets a number. Cancelling the caller ends the call.

        Raises SandboxUnavailable when the broker ended while the call ran, NotStarted when it had not begun.
        """
        if not self.alive:
            raise SandboxUnavailable(self.failure or "the sandbox's broker is not running")
        self._count += 1
        identity = self._count
        future = self._loop.create_future()
        self._started.clear(identity)
        message["id"] = identity
        self._write(message)
        self._waiting[identity] = future, message.get("session")
        try:
            return await future
        except asyncio.CancelledError:
            if self._waiting.pop(identity, None) is not None and self.alive:
                self._write({"op": "cancel", "id": identity})
            raise

    def close_session(self, name: str) -> None:
        self.sessions.discard(name)
        if self.alive:
            self._write({"op": "close", "session": name})

    @property
    def killed(self) -> bool:
        """Whether a signal ended the broker. Before it was ready, another one may have better luck."""
        return self._process is not None and (self._process.returncode or 0) < 0

    @property
    def broker_pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def close(self) -> None:
        """End the broker and remove what it left; safe to call twice."""
        if self.alive:
            self.failure = "the sandbox was closed"
        if self._transport is not None:
            self._transport.close()
        if self._process is not None:
            try:
                await asyncio.to_thread(self._process.wait, _EXIT_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                await asyncio.to_thread(self._process.wait)
        if self._ending is not None:
            await self._ending
        self._started.close()
        groups, self._cgroup = self._cgroup, []
        if groups:  # of a broker that was killed
            await asyncio.to_thread(cgroup.remove, groups, trees.REMOVE_SECONDS)
        folder, self._folder = self._folder, None
        if folder is not None:
            await asyncio.to_thread(trees.remove_tree, folder, trees.REMOVE_SECONDS)

    def _write(self, message: dict[str, Any]) -> None:
        self._to_send.append(pack(message))  # what JSON cannot hold is refused here, where the caller is
        self._write_soon()

    def _write_soon(self) -> None:
        """With what else is to be written until then."""
        if not self._writing:
            self._writing = True
            self._loop.call_soon(self._write_some)

    def _write_some(self) -> None:
        """A few messages in one system call."""
        assert self._transport is not None
        if self._transport.is_closing():
            return
        count = min(len(self._to_send), _MESSAGES_AT_ONCE)
        if count:
            self._transport.write(b"".join([self._to_send.popleft() for _ in range(count)]))
        self._writing = bool(self._to_send)
        if self._writing:
            self._loop.call_soon(self._write_some)

    # asyncio.BufferedProtocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        while self._read_answers():
            pass  # its last words come first
        self.alive = False
        self._ending = self._loop.create_task(self._fail())

    async def _fail(self) -> None:
        """Tell all who wait why there will be no answer."""
        assert self._process is not None
        if self.failure is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(self._process.wait, _EXIT_SECONDS)
            self.failure = f"the sandbox's broker ended ({_how(self._process.returncode)})"
        assert self._ready is not None
        if not self._ready.done():
            self._ready.set_exception(SandboxUnavailable(self.failure))
        for identity, (future, session) in self._waiting.items():
            started = identity in self._started
            if started and session is not None:
                self.sessions.add(session)
            if not future.done():
                future.set_exception(SandboxUnavailable(self.failure) if started else NotStarted(self.failure))
        self._waiting.clear()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self._received.feed(self._buffer[:nbytes])
        if not self._reading:
            self._read_some()

    def _read_some(self) -> None:
        self._reading = self._read_answers()
        self._write_soon()  # right after those who got these have made their next calls
        if self._reading:
            self._loop.call_soon(self._read_some)

    def _read_answers(self) -> bool:
        """Hand out a few; whether there may be more."""
        for _ in range(_MESSAGES_AT_ONCE):
            message = self._received.take()
            if message is None:
                return False
            self._on_message(message)
        return True

    def _on_message(self, message: dict[str, Any]) -> None:
        if "fatal" in message:
            self.failure = _explain(self._policy.isolation, message["fatal"], message["layer"])
        elif "event" in message:
            logger.warning("sandbox: %s", message["event"])
        elif "ready" in message:
            assert self._ready is not None
            self._cgroup = message["cgroup"]
            with contextlib.suppress(asyncio.InvalidStateError):
                self._ready.set_result(None)
        else:
            future, session = self._waiting.pop(message["id"], (None, None))
            if session is not None and message["status"] != "unavailable":
                self.sessions.add(session)
            if future is not None and not future.done():
                future.set_result(message)


def _how(status: int | None) -> str:
    if status is None:
        return "it closed its socket and still runs"
    if status >= 0:
        return f"exit code {status}"
    hint = ", most likely for want of memory" if status == -signal.SIGKILL else ""
    return f"killed by {signal.Signals(-status).name}{hint}"


def _explain(isolation: str, reason: str, layer: str | None) -> str:
    if layer is None:
        return f"the sandbox stopped: {reason}"
    what = f"sandbox isolation {isolation!r} is not available: layer '{layer}' was refused: {reason}"
    return f"{what}. {_ADVICE[layer]}"
