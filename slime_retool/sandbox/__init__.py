"""Runs code that a model wrote, outside our own processes.

    async with Sandbox(SandboxPolicy(memory_mb=256)) as box:
        result = await box.run("print(6 * 7)", timeout=5)

Imports neither torch nor any other part of the training stack.
"""

from slime_retool.sandbox.policy import Result, SandboxPolicy, SandboxUnavailable, Status
from slime_retool.sandbox.sandbox import Sandbox, run_sync

__all__ = ["Result", "Sandbox", "SandboxPolicy", "SandboxUnavailable", "Status", "run_sync"]
