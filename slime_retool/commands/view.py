"""`slime-retool view FILE`: read dumped samples (--dump-rollouts) or evaluation transcripts."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slime_retool.errors import ConfigError, DataError, run_command
from slime_retool.rollout.sample_metrics import is_right
from slime_retool.types import Sample

PROG = "slime-retool view"


def main(argv: Sequence[str] | None = None) -> int:
    """Print samples, one after the other. Returns 2 for a file that does not exist or holds none."""
    parser = argparse.ArgumentParser(prog=PROG, description=__doc__)
    parser.add_argument("file", type=Path, help="a .jsonl file below OUTPUT_DIR/rollouts or OUTPUT_DIR/eval")
    parser.add_argument("--index", type=int, help="show only the sample with this index")
    parser.add_argument("--limit", type=int, default=5, help="how many samples to show (default: %(default)s)")
    parser.add_argument(
        "--wrong",
        action="store_true",
        help="only samples that an evaluation counts as wrong, and those without a reward",
    )
    parser.add_argument(
        "--accuracy-threshold",
        type=float,
        help="with --wrong: the reward of a right answer is at least this, where the reward has no entry acc",
    )
    parser.add_argument("--reward-key", help="entry of a reward with several that is the reward (default: score)")
    args = parser.parse_args(argv)
    return run_command(PROG, lambda: _show(args))


def _show(args: argparse.Namespace) -> int:
    """DataError for a file that cannot be read, or that holds something else than samples."""
    if not args.file.is_file():
        raise DataError(f"no such file: {args.file}")
    try:
        lines = args.file.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{args.file} cannot be read: {error}") from error
    shown = 0
    for number, line in enumerate(lines, start=1):
        if not line or shown >= args.limit:
            continue
        try:
            row = json.loads(line)
            page = sample_text(row, args.reward_key)
        except (ValueError, LookupError, TypeError) as error:
            if number == len(lines):  # still being written, or cut off when its run was killed
                continue
            raise DataError(
                f"{args.file}, line {number} is no dumped sample; give a file below OUTPUT_DIR/rollouts "
                "(--dump-rollouts) or OUTPUT_DIR/eval"
            ) from error
        if args.index is not None and row["index"] != args.index:
            continue
        try:
            sample = Sample(row["prompt"], row["label"], reward=row["reward"])
            if args.wrong and sample.reward is not None and _is_right(sample, args):
                continue
        except ValueError as error:
            raise DataError(f"{args.file}, line {number}: {error}") from error
        shown += 1
        print(page, flush=True)
    if not shown:
        print("no sample matches")
    return 0


def _is_right(sample: Sample, args: argparse.Namespace) -> bool:
    right = is_right(sample, args.reward_key, args.accuracy_threshold)
    if right is None:
        raise ConfigError("--wrong: rewards alone do not say which answers are wrong; add --accuracy-threshold")
    return right


def sample_text(row: dict[str, Any], reward_key: str | None) -> str:
    """One dumped sample as a page. LookupError or TypeError for another object."""
    reward, acc = row["reward"], ""
    if isinstance(reward, dict):
        acc = f"  acc {reward['acc']}" if "acc" in reward else ""
        reward = reward.get(reward_key or "score", reward)
    head = f"sample {row['index']}  label {row['label']}  reward {reward}{acc}  {row['status']}"
    prompt, response = row["prompt"], row["response"]
    if not isinstance(prompt, str):
        prompt = "\n".join(f"[{m['role']}] {m.get('content', '')}" for m in prompt)
    return f"{'=' * 80}\n{head}\n{'-' * 80}\n{prompt}\n{'-' * 80}\n{response}"
