"""One SGLang server that several evaluations share, until it is told to end.

    python shared_server.py --url-file FILE -- --hf-checkpoint DIR --output-dir DIR [--sglang-FLAG VALUE ...]

The flags after `--` are those of `slime_retool.train` that an engine reads. FILE holds the server's address once it is
healthy; SIGTERM or Ctrl-C ends it, and so does the end of whoever started this.
"""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from pathlib import Path

from slime_retool.config import parse_config, resolve
from slime_retool.engine.server import EngineProcess
from slime_retool.errors import run_command

PROG = "shared_server.py"


def main() -> int:
    parser = argparse.ArgumentParser(prog=PROG, description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--url-file", type=Path, required=True)
    parser.add_argument("flags", nargs="*", help="after --: flags of slime_retool.train")
    args = parser.parse_args()
    return run_command(PROG, lambda: serve(args.url_file, args.flags))


def serve(url_file: Path, flags: list[str]) -> int:
    """Start the server and wait. Raises ServerError when it does not start, ConfigError for flags that cannot work."""
    end = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: end.set())
    url_file.unlink(missing_ok=True)
    with EngineProcess(resolve(parse_config(flags))) as engine:
        part = url_file.with_name(url_file.name + ".part")
        part.write_text(engine.url + "\n")
        part.replace(url_file)
        while not end.wait(1.0):
            if not engine.alive:
                print(f"the server has died: it {engine.ending}\n{engine.log_tail()}", file=sys.stderr)
                return 1
    url_file.unlink(missing_ok=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
