"""Entry point of the sandbox's own processes: `python -I -S boot.py broker|zygote <control fd>`.

Registers this folder as a package of its own, so that the parent packages (asyncio and more) are not imported.
"""

import os
import sys
import types

if __name__ == "__main__":
    package = types.ModuleType("jail")
    package.__path__ = [os.path.dirname(os.path.abspath(__file__))]
    sys.modules["jail"] = package
    if sys.argv[1] == "broker":
        from jail.broker import broker

        broker.main(int(sys.argv[2]))
    else:
        from jail.child import zygote

        zygote.main(int(sys.argv[2]))
