"""`slime-retool sandbox serve`: the sandbox as a service that speaks SandboxFusion's /run_code.

Without --token-file whoever reaches the address may run code: keep it on a private one.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from slime_retool.errors import refuse, run_command
from slime_retool.sandbox.host.policy import (
    ISOLATION_LEVELS,
    MAX_TIMEOUT,
    SandboxPolicy,
    SandboxUnavailable,
    read_token,
)

PROG = "slime-retool sandbox serve"


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until interrupted. Returns 1 where the isolation level or the address cannot be had, 2 for a bad limit."""
    parser = argparse.ArgumentParser(
        prog=PROG, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )  # fmt: skip
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8080, help="port to listen on (default: %(default)s)")
    parser.add_argument(
        "--isolation", choices=ISOLATION_LEVELS, default=ISOLATION_LEVELS[0],
        help="how the code is shut in, see docs/sandbox.md (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--concurrency", type=int, default=16, help="calls that run at once (default: %(default)s)")
    parser.add_argument(
        "--memory-mb", type=int, default=512,
        help="memory of a call in MiB, and the most that a request may ask for (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--max-timeout", type=float, default=MAX_TIMEOUT,
        help="most seconds that a request may ask for (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--token-file", type=Path,
        help="file whose text requests must send as `Authorization: Bearer TEXT` (default: none is asked for)",
    )  # fmt: skip
    args = parser.parse_args(argv)
    return run_command(PROG, lambda: _serve(args))


def _serve(args: argparse.Namespace) -> int:
    from slime_retool.sandbox.host.server import serve

    policy = SandboxPolicy(args.isolation, concurrency=args.concurrency, memory_mb=args.memory_mb)
    token = None if args.token_file is None else read_token(args.token_file)
    print(f"sandbox ({args.isolation}) on http://{args.host}:{args.port}/run_code", file=sys.stderr)
    try:
        serve(args.host, args.port, policy, args.max_timeout, token)
    except (SandboxUnavailable, OSError, OverflowError) as error:
        return refuse(PROG, error, code=1)
    return 0
