"""Runs code that a model wrote, outside our own processes and out of their reach.

    async with Sandbox(SandboxPolicy(memory_mb=256)) as box:
        result = await box.run("print(6 * 7)", timeout=5)
        session = box.session("trajectory 17")
        await session.run("x = 3")
        await session.run("x ** 2")

One folder for each kind of process, each in pure Python (ctypes, no compiled extension):

    host (the caller's, asyncio)  ->  broker (one process: time, output, status, kills; where folders need one, with a
    keeper of them beside it)  ->  child (a zygote, and its fork for every call or session)

`broker` and `child` are started by `boot.py` and import only the standard library and what is below them, so that a
fork of the zygote is small. Nothing here imports torch or any other part of the training stack. docs/sandbox.md has
the layers and their limits.
"""

from slime_retool.sandbox.host.policy import Result, SandboxPolicy, SandboxUnavailable, Status
from slime_retool.sandbox.host.sandbox import Sandbox, Session

__all__ = ["Result", "Sandbox", "SandboxPolicy", "SandboxUnavailable", "Session", "Status"]
