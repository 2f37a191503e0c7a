"""Entry point of the sandbox's own processes, and the command that starts one.

Registers this folder as a package of its own, so that the parent packages (asyncio and more) are not imported.
"""

import importlib
import os
import sys
import types


def command(role: str, control: int) -> list[str]:
    """Start the module `role`, with its control socket as this descriptor, in a bare interpreter."""
    python = os.path.realpath(sys.executable)
    # As `-I`, but for the variables of Python's own (the hash seed): they are those of the jail, none is the caller's.
    return [python, "-s", "-S", "-B", "-X", "utf8", os.path.abspath(__file__), role, str(control)]


if __name__ == "__main__":
    del sys.path[0]  # this folder
    package = types.ModuleType("jail")
    package.__path__ = [os.path.dirname(os.path.abspath(__file__))]
    sys.modules["jail"] = package
    importlib.import_module(f"jail.{sys.argv[1]}").main(int(sys.argv[2]))
