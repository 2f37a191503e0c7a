"""The zygote: shuts itself in, imports the packages, then forks one locked-down child per request.

At isolation level `none` it shuts nothing in, and a guardian stands between it and each child: there the code may start
processes, and the guardian ends them with it.

It never holds code or results. Its control socket (SOCK_SEQPACKET) carries one JSON configuration in and one answer
out, with the filter's listener; then per fork `<I` tag and a folder's name with three descriptors in; and out `F` tag
with a pidfd, `X` tag status usage, or `E` tag and an error number where the system lends no process.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import importlib
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Iterator
from typing import Any

from . import executor, landlock, memory, namespaces, seccomp, warmup
from .environment import DEVICES, host_paths, without
from .syscalls import (
    PR_SET_CHILD_SUBREAPER,
    PR_SET_NO_NEW_PRIVS,
    PR_SET_PDEATHSIG,
    drop_bounding_set,
    drop_capabilities,
    prctl,
    raw_fork,
)

FORKED = struct.Struct("<cI")
EXITED = struct.Struct("<cIiddQ")
FAILED = struct.Struct("<cIi")
FORK = struct.Struct("<I32s")
SETUP_FAILED = 99

LAYERS = "user mount pid net ipc uts cgroup landlock seccomp notify capabilities rlimits freeze environment".split()
"""All layers by name; tests switch one off to see what it stops. `freeze` and `environment` are the broker's."""
_KEPT_AT_NONE = {"environment", "rlimits", "freeze"}

_NICE = 5
_STACK = 8 << 20
_RLIMIT_SIGPENDING = 11
"""Not in the resource module before Python 3.13. Counted per user: one call must not use up all."""
_PENDING_SIGNALS = 1024
_KILL_SECONDS = 10.0
_OOM_SCORE, _OOM_SCORE_OF_CHILDREN = 500, 1000
"""Of what memory there is, in thousandths, added to what a process uses: calls go before the zygote, whose end takes
all of its sessions along, and both before programs around the sandbox."""


class LayerError(Exception):
    """A layer that this machine refuses: the reason and the layer's name."""


@contextlib.contextmanager
def _layer(name: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise LayerError(str(error), name) from error


class Zygote:
    def __init__(self, control: socket.socket, config: dict[str, Any]) -> None:
        self.control = control
        self.config = config
        self.limits: dict[str, int] = config["limits"]
        self.private = config["isolation"] == "namespaces"
        self.bare = config["isolation"] == "none"
        self.off = {*config["off"], *(set(LAYERS) - _KEPT_AT_NONE if self.bare else ())}
        self.paths = host_paths()
        self.rules: landlock.Ruleset | None = None
        self.private_root = self.private and "mount" not in self.off
        self.private_pids = self.private and "pid" not in self.off
        self.listener: int | None = None
        self.oom_score_file, self.oom_score = -1, _OOM_SCORE
        self.tags: dict[int, tuple[int, int]] = {}  # by pidfd: process id, tag
        self.epoll = select.epoll()

    # Shutting in.

    def set_up(self) -> None:
        os.environ.pop("LD_LIBRARY_PATH", None)  # it has served to start the interpreter
        if self.private:
            self._enter_namespaces()
        else:
            if os.geteuid() == 0 and "user" not in self.off:
                self._become_ordinary_user()
            self._open_own_files()
        os.umask(0o077)
        os.nice(_NICE)
        sys.path += [namespaces.PACKAGES] if self.private_root else self.config["path"]
        for name in (*warmup.STDLIB, *self.config["preload"]):
            importlib.import_module(name)
        warmup.warm(self.config["preload"])
        if self.private_root:
            sys.path.insert(0, namespaces.WORK)  # modules that the code writes
        self.executor = executor.Executor(self.limits["max_output_bytes"])
        if not self.bare:
            prctl(PR_SET_NO_NEW_PRIVS, 1)
            drop_bounding_set()
        if "landlock" not in self.off:
            with _layer("landlock"):
                self.rules = self._rules()
            self.beside_work = self._beside_work()
        if "seccomp" not in self.off:
            with _layer("seccomp"):
                self._install_filter()
            self.child_filter = seccomp.stage2(1, private_root=True)
        if not self.private and "capabilities" not in self.off:
            drop_capabilities()
        gc.collect()
        memory.make_immortal()
        self.plugs = memory.use_up_gaps()
        gc.freeze()
        gc.disable()
        memory.collapse(self.maps_file)
        self.address_space, self.page_tables, _ = memory.usage(os.pread(self.status_file, memory.STATUS_SIZE, 0))

    def _install_filter(self) -> None:
        """Without a listener the broker looks now and then, by which time there may be more than it allows."""
        if "notify" not in self.off:
            with contextlib.suppress(OSError):
                self.listener = seccomp.install_and_listen(seccomp.stage1(ask=True))
                return
        seccomp.install(seccomp.stage1(ask=False))

    def _enter_namespaces(self) -> None:
        as_root = os.geteuid() == 0
        root: str | None = None
        wanted = [name for name in namespaces.FLAGS if name not in self.off]
        flags = sum(namespaces.FLAGS[name] for name in wanted)
        if as_root and self.private_root:
            # While still root, so that an interpreter below a 0700 home can be shown to the ordinary user inside.
            with _layer("mount namespace"):
                namespaces.unshare(namespaces.NEWNS)
                root = self._build_root()
        if "user" in self.off:
            with _layer("user and other namespaces"):
                namespaces.unshare(flags)
        else:
            if as_root and self.private_root:
                with _layer("setuid"):
                    namespaces.become_nobody(self.limits["uid"])
            with _layer("user and other namespaces"):
                ids = os.getuid(), os.getgid()
                namespaces.unshare(namespaces.NEWUSER | flags)
                namespaces.write_maps(*ids)
        if self.private_root and root is None:
            with _layer("mount namespace"):
                root = self._build_root()
        if self.private_pids:
            _continue_as_first_process(self.control)
            self.own_pid_namespace = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
        if "uts" not in self.off:
            socket.sethostname("sandbox")
        self._open_own_files()
        if root is not None:
            with _layer("mount namespace"):
                namespaces.enter_root(root)

    def _open_own_files(self) -> None:
        """While /proc is there; they are read after the packages are loaded."""
        self.status_file, self.maps_file = (
            os.open(f"/proc/self/{name}", os.O_RDONLY | os.O_CLOEXEC) for name in ("status", "maps")
        )
        with contextlib.suppress(OSError):
            self.oom_score_file = os.open("/proc/self/oom_score_adj", os.O_RDWR | os.O_CLOEXEC)
            # Below what a container was given, not everybody may go again.
            self.oom_score = max(_OOM_SCORE, int(os.pread(self.oom_score_file, 16, 0)))
        self._set_oom_score(self.oom_score)

    def _set_oom_score(self, score: int) -> None:
        with contextlib.suppress(OSError):
            os.pwrite(self.oom_score_file, b"%d" % score, 0)

    def _build_root(self) -> str:
        packages: dict[str, str] = self.config["packages"]
        binds = [(path, path) for path in self.paths.readable]
        binds += [(path, f"{namespaces.PACKAGES}/{name}") for name, path in packages.items()]
        links = list(self.paths.links)
        if not any(inside.startswith("/tmp/") for _, inside in binds):
            links.append(("/tmp", namespaces.WORK))  # else it is a folder, and `tempfile` goes by TMPDIR
        hidden = [path for path, inside in binds if f"{inside}/".startswith(f"{namespaces.WORK}/")]
        if hidden:
            raise LayerError(f"{hidden[0]} is needed, but {namespaces.WORK} is where a call's own files are", "paths")
        namespaces.make_private()
        return namespaces.build_root(binds, self.paths.hidden, links)

    def _become_ordinary_user(self) -> None:
        """Without namespaces, root drops to an ordinary user if that one can read the interpreter and the packages."""
        uid = self.limits["uid"]
        needed = [*self.paths.readable, *self.config["packages"].values(), *self.config["path"]]
        if _readable_as(uid, needed):
            os.chown(self.config["work"], uid, uid)
            namespaces.become_nobody(uid)

    def _rules(self) -> landlock.Ruleset:
        rules = landlock.Ruleset()
        if not self.private_root and rules.abi < landlock.ABI_TRUNCATE:
            raise OSError(95, f"Landlock ABI {rules.abi} cannot deny truncating a file, which needs ABI 3 (Linux 6.2)")
        for path in (path for path in self.paths.readable if path not in DEVICES):
            # With a private root, hidden folders are empty.
            for part in [path] if self.private_root else without(path, self.paths.hidden):
                rules.allow(part, landlock.READ_ONLY)
        for device in DEVICES:
            rules.allow(device, landlock.READ | landlock.IOCTL_DEV)
        rules.allow("/dev/null", landlock.READ | landlock.WRITE | landlock.TRUNCATE)
        if self.private_root:
            # On the parent: a rule on the mount point would be hidden by the mount.
            rules.allow("/sandbox", landlock.READ_WRITE | landlock.EXECUTE)
            rules.allow("/", landlock.READ_DIR)
        else:
            for path in self.paths.readable:
                rules.allow(path, landlock.READ_DIR)
            for path in (*self.config["path"], *self.config["packages"].values()):
                rules.allow(path, landlock.READ_ONLY)
            rules.allow(self.config["work"], landlock.READ_WRITE)
        return rules

    def _beside_work(self) -> list[str]:
        """Few paths that cover all readable ones and hold no call's folder."""
        readable = (*self.paths.readable, *self.config["path"], *self.config["packages"].values())
        tops = [path[: path.index("/", 1)] if path.count("/") > 1 else path for path in readable]
        work = self.config["work"] or ""
        return list(
            dict.fromkeys(path if work.startswith(f"{top}/") else top for path, top in zip(readable, tops, strict=True))
        )

    def _confine_to(self, folder: str) -> None:
        """A second set of rules, which can only take away: of all the calls' folders, just this one."""
        rules = landlock.Ruleset()
        for path in self.beside_work:
            rules.allow(path, landlock.READ_ONLY | landlock.IOCTL_DEV)
        rules.allow("/dev/null", landlock.WRITE | landlock.TRUNCATE)
        rules.allow(folder, landlock.READ_WRITE)
        rules.restrict_self()
        os.close(rules.fd)

    # Forking.

    def serve(self) -> None:
        """Until the control socket closes, by the broker or its end; then end and reap what was forked here."""
        try:
            with contextlib.suppress(ConnectionError):
                self._serve()
        finally:
            for pid, _ in self.tags.values():
                os.kill(pid, signal.SIGTERM if self.bare else signal.SIGKILL)  # a guardian has to end others
            for pid, _ in self.tags.values():
                os.waitpid(pid, 0)

    def _serve(self) -> None:
        # Pidfds and not SIGCHLD, which would come at every stop and continuation of a session.
        self.epoll.register(self.control, select.EPOLLIN)
        while True:
            for fd, _ in self.epoll.poll():
                if fd in self.tags:
                    self._reap(fd)
                    continue
                message, fds, _, _ = socket.recv_fds(self.control, FORK.size, 3)
                if not message:
                    return
                tag, folder = FORK.unpack(message)
                try:
                    self._fork(tag, folder.decode(), fds)
                except OSError as error:
                    # The system is out of processes or descriptors; those that run go on.
                    self.control.send(FAILED.pack(b"E", tag, error.errno or 0))
                finally:
                    for fd in fds:
                        os.close(fd)

    def _fork(self, tag: int, folder: str, fds: list[int]) -> None:
        if len(fds) != 3:
            raise OSError(errno.EMFILE, "no descriptors left")
        if self.private_pids:
            namespaces.unshare(namespaces.NEWPID)
        try:
            self._set_oom_score(_OOM_SCORE_OF_CHILDREN)  # inherited: a child sees no /proc
            pid = raw_fork()
            if pid == 0:
                (self._become_guardian if self.bare else self._become_child)(tag, folder, fds)
        finally:
            self._set_oom_score(self.oom_score)
            if self.private_pids:
                namespaces.join_pid_namespace(self.own_pid_namespace)
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise
        self.tags[pidfd] = pid, tag
        self.epoll.register(pidfd, select.EPOLLIN)
        if not self.bare:
            socket.send_fds(self.control, [FORKED.pack(b"F", tag)], [pidfd])

    def _reap(self, pidfd: int) -> None:
        pid, tag = self.tags.pop(pidfd)
        self.epoll.unregister(pidfd)  # closing it does not: the broker has a copy
        os.close(pidfd)
        _, status, usage = os.wait4(pid, 0)
        self._report_end(tag, status, usage)  # of a guardian: only heard if it could not report its child's

    def _report_end(self, tag: int, status: int, usage: resource.struct_rusage) -> None:
        self.control.send(EXITED.pack(b"X", tag, status, usage.ru_utime, usage.ru_stime, usage.ru_maxrss * 1024))

    def _become_guardian(self, tag: int, folder: str, fds: list[int]) -> None:
        """Fork the child, and end with it all that it started: orphans come to us. Never returns."""
        try:
            prctl(PR_SET_CHILD_SUBREAPER, 1)
            prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
            pid = raw_fork()
            if pid == 0:
                self._become_child(tag, folder, fds)
            signal.signal(signal.SIGTERM, lambda *_: os.kill(pid, signal.SIGKILL))
            for fd in fds:
                os.close(fd)
            pidfd = os.pidfd_open(pid)
            socket.send_fds(self.control, [FORKED.pack(b"F", tag)], [pidfd])
            # Not reaped yet: until its group has been killed, the number must stay ours.
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
            _, status, usage = os.wait4(pid, 0)
            # What left the group becomes our child when its own parent dies: so every generation is reached.
            _kill_all_children()
            self._report_end(tag, status, usage)
        finally:
            os._exit(0)

    def _become_child(self, tag: int, name: str, fds: list[int]) -> None:
        """Lock down and run what the broker sends. Never returns."""
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            if self.bare:
                os.setsid()  # signals to its own group reach nobody else
            self._arrange_descriptors(*fds)
            folder = self._enter_work_folder(name)
            if "rlimits" not in self.off:
                self._set_limits()
            if self.rules is not None:
                self.rules.restrict_self()
                if not self.private_root:
                    self._confine_to(folder)
                os.close(self.rules.fd)
            if "capabilities" not in self.off:
                drop_capabilities()
            if "seccomp" not in self.off:
                pid = os.getpid()
                seccomp.install(
                    self.child_filter if pid == 1 and self.private_root else seccomp.stage2(pid, self.private_root)
                )
            self.executor.serve()
        except BaseException as error:
            os.write(2, f"setting up the process failed: {error!r}".encode())
        finally:
            os._exit(SETUP_FAILED)

    def _arrange_descriptors(self, control: int, out: int, err: int) -> None:
        """0 nothing, 1 and 2 output, 3 the broker; all others of the zygote but its rules are closed."""
        nothing = os.open("/dev/null", os.O_RDONLY)
        high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 4) for fd in (nothing, out, err, control)]
        for index, fd in enumerate(high):
            os.dup2(fd, index)
        keep = self.rules.fd if self.rules is not None else 3
        assert self.rules is None or keep > 3
        os.closerange(4, keep)
        os.closerange(keep + 1, 1 << 16)

    def _enter_work_folder(self, name: str) -> str:
        if not self.private_pids:
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if self.private_root:
            namespaces.unshare(namespaces.NEWNS)
            namespaces.mount_scratch(self.limits["max_disk_mb"], self.limits["max_inodes"])
            folder = namespaces.WORK
        else:
            folder = os.path.join(self.config["work"], name)
            os.mkdir(folder, 0o700)
            os.environ["HOME"] = os.environ["TMPDIR"] = folder
            sys.path.insert(0, folder)
        os.chdir(folder)
        return folder

    def _set_limits(self) -> None:
        limits = {
            resource.RLIMIT_CORE: 0,
            resource.RLIMIT_MEMLOCK: 0,
            resource.RLIMIT_MSGQUEUE: 0,
            _RLIMIT_SIGPENDING: _PENDING_SIGNALS,
            resource.RLIMIT_NOFILE: self.limits["max_open_files"],
            resource.RLIMIT_FSIZE: self.limits["max_file_mb"] << 20,
            resource.RLIMIT_STACK: _STACK,
            resource.RLIMIT_AS: self.address_space + (self.limits["memory_mb"] << 20) + executor.ANSWER_ROOM,
        }
        if self.bare:
            _, hard = resource.getrlimit(resource.RLIMIT_NPROC)
            most = self.limits["max_processes"]
            limits[resource.RLIMIT_NPROC] = most if hard == resource.RLIM_INFINITY else min(most, hard)
        for name, value in limits.items():
            resource.setrlimit(name, (value, value))


def _continue_as_first_process(control: socket.socket) -> None:
    """Fork into the new PID namespace. The parent only waits, so that someone of the broker's reaps us."""
    pid = os.fork()
    if pid:
        control.close()
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # with the broker; the namespace's end is then the kernel's work
        _, status = os.waitpid(pid, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 0x7F)
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _kill_all_children() -> None:
    """Until there are none, as long as that takes a few seconds."""
    deadline = time.monotonic() + _KILL_SECONDS
    while time.monotonic() < deadline:
        with open(f"/proc/self/task/{os.getpid()}/children", "rb") as file:
            for pid in map(int, file.read().split()):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.002)


def _readable_as(uid: int, paths: list[str]) -> bool:
    pid = os.fork()
    if pid == 0:
        try:
            namespaces.become_nobody(uid)
            os._exit(0 if all(os.access(path, os.R_OK) for path in paths) else 1)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def main(fd: int) -> None:
    control = socket.socket(fileno=fd)
    zygote = Zygote(control, json.loads(control.recv(1 << 20)))
    answer: dict[str, Any]
    fds: list[int] = []
    try:
        zygote.set_up()
        answer = {"address_space": zygote.address_space, "page_tables": zygote.page_tables}
        if zygote.listener is not None:
            fds.append(zygote.listener)
    except LayerError as error:
        answer = dict(zip(("fatal", "layer"), error.args, strict=True))
    except Exception as error:
        answer = {"fatal": f"{type(error).__name__}: {error}", "layer": "environment"}
    with contextlib.suppress(OSError):
        socket.send_fds(control, [json.dumps(answer).encode()], fds)
    for own in fds:
        os.close(own)
    if "fatal" in answer:
        os._exit(3)
    zygote.serve()
    os._exit(0)
