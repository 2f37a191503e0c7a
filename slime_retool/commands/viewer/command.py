"""`slime-retool view RUN [RUN2] [--out DIR]`: read a run's samples in a terminal, or make a page of all of it.

Without --out, samples are printed as text; RUN is then an --output-dir or one file of samples. With --out, DIR gets
index.html and its data: a page that opens from disk, without a server or a network.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from slime_retool.commands.viewer.text import Choice, show
from slime_retool.errors import ConfigError, run_command

PROG = "slime-retool view"


def main(argv: Sequence[str] | None = None) -> int:
    """Print samples or write the page. Returns 2 for a run or file that does not exist or holds nothing to show."""
    parser = argparse.ArgumentParser(
        prog=PROG, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "run", type=Path, nargs="+", metavar="RUN",
        help="an --output-dir, or a .jsonl file below its rollouts or eval; with --out, two runs to compare",
    )  # fmt: skip
    parser.add_argument("--reward-key", help="entry of a reward with several that is the reward (default: score)")
    parser.add_argument(
        "--accuracy-threshold",
        type=float,
        help="the reward of a right answer is at least this, where the reward has no entry acc",
    )
    text = parser.add_argument_group("text")
    text.add_argument("--index", type=int, help="show only the sample with this index")
    text.add_argument("--limit", type=int, default=5, help="how many samples to show (default: %(default)s)")
    text.add_argument(
        "--wrong",
        action="store_true",
        help="only samples that an evaluation counts as wrong, and those without a reward",
    )
    page = parser.add_argument_group("page")
    page.add_argument("--out", type=Path, metavar="DIR", help="write the page to DIR/index.html")
    page.add_argument(
        "--hf-checkpoint",
        metavar="DIR",
        help="tokenizer that reads the tokens of a dump without their texts; training dumps have them",
    )
    args = parser.parse_args(argv)
    return run_command(PROG, lambda: _view(args))


def _view(args: argparse.Namespace) -> int:
    most = 1 if args.out is None else 2
    if len(args.run) > most:
        raise ConfigError(f"{len(args.run)} runs were given; text shows one run at a time, a page (--out) one or two")
    if args.out is None:
        show(args.run[0], Choice(args.index, args.limit, args.wrong, args.reward_key, args.accuracy_threshold))
        return 0
    from slime_retool.commands.viewer.page import build_page  # numpy takes longer than reading a file

    page = build_page(
        args.run, args.out, reward_key=args.reward_key, accuracy_threshold=args.accuracy_threshold,
        hf_checkpoint=args.hf_checkpoint,
    )  # fmt: skip
    print(f"{page.path}: {page.samples} samples, {page.steps} steps of metrics, {page.size / 2**20:.1f} MiB")
    return 0
