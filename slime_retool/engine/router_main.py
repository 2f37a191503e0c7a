"""`sglang_router.launch_router` without its import of the whole of SGLang (0.1 s instead of 8 s).

python router_main.py --worker-urls URL... --host HOST --port PORT ...   (the launcher's own flags)
"""

from __future__ import annotations

import argparse
import sys


def main(argv: list[str]) -> None:
    from sglang_router.router import Router
    from sglang_router.router_args import RouterArgs

    parser = argparse.ArgumentParser()
    RouterArgs.add_cli_args(parser)
    Router.from_args(RouterArgs.from_cli_args(parser.parse_args(argv))).start()


if __name__ == "__main__":
    main(sys.argv[1:])
