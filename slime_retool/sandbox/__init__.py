"""Runs code that a model wrote, outside our own processes and out of their reach.

    async with Sandbox(SandboxPolicy(memory_mb=256)) as box:
        result = await box.run("print(6 * 7)", timeout=5)
        session = box.session("trajectory 17")
        await session.run("x = 3")
        await session.run("x ** 2")

Imports neither torch nor any other part of the training stack. docs/sandbox.md has the layers and their limits.
"""

from slime_retool.sandbox.policy import Result, SandboxPolicy, SandboxUnavailable, Status
from slime_retool.sandbox.sandbox import Sandbox, Session, run_sync

__all__ = ["Result", "Sandbox", "SandboxPolicy", "SandboxUnavailable", "Session", "Status", "run_sync"]
