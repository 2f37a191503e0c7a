"""`slime-retool sandbox serve`: the sandbox as a service that speaks SandboxFusion's /run_code.

There is no authentication: keep it on a private address.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from slime_retool.errors import refuse, run_command
from slime_retool.sandbox.host.policy import ISOLATION_LEVELS, SandboxPolicy, SandboxUnavailable

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
    args = parser.parse_args(argv)
    return run_command(PROG, lambda: _serve(args))


def _serve(args: argparse.Namespace) -> int:
    from slime_retool.sandbox.host.server import serve

    policy = SandboxPolicy(args.isolation, concurrency=args.concurrency)
    print(f"sandbox ({args.isolation}) on http://{args.host}:{args.port}/run_code", file=sys.stderr)
    try:
        serve(args.host, args.port, policy)
    except (SandboxUnavailable, OSError, OverflowError) as error:
        return refuse(PROG, error, code=1)
    return 0
