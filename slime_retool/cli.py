"""`slime-retool COMMAND`: the small tools beside training.

slime-retool doctor            what this host has of what a run needs
slime-retool train FLAGS       the same as python -m slime_retool.train
slime-retool eval FLAGS        measure a checkpoint, or a model behind an API, with the run's own tools and rewards
slime-retool data check FILE   every row read, rendered, and its own answer scored
slime-retool plan FLAGS        memory and time of a run, before it is launched
slime-retool view FILE         read dumped samples or evaluation transcripts
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from slime_retool.errors import ConfigError
from slime_retool.rollout import eval_figures
from slime_retool.sandbox.host.policy import ISOLATION_LEVELS, SandboxPolicy, SandboxUnavailable
from slime_retool.types import Sample

REQUIRED = ("torch", "megatron-core", "sglang", "sglang-router", "ray", "transformers", "datasets", "aiohttp")
OPTIONAL = ("transformer-engine", "flash-attn-4", "wandb", "tensorboard", "math-verify", "numpy", "sympy")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit code."""
    if os.getcwd() not in (os.path.abspath(folder) for folder in sys.path):
        sys.path.insert(0, os.getcwd())  # as `python -m` does: a hook's file may lie where the command is given
    try:
        return _run(list(sys.argv[1:] if argv is None else argv))
    except BrokenPipeError:  # `| head` has seen enough; nothing is left for the interpreter to write on its way out
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _run(arguments: list[str]) -> int:
    if arguments[:1] == ["train"]:
        from slime_retool.train import main as train

        return train(arguments[1:])
    if arguments[:1] == ["eval"]:
        from slime_retool.commands.eval import main as evaluate

        return evaluate(arguments[1:])
    if arguments[:1] == ["plan"]:
        from slime_retool.commands.plan.command import main as plan

        return plan(arguments[1:])
    if arguments[:2] == ["data", "check"]:
        from slime_retool.commands.data_check import main as check_data

        return check_data(arguments[2:])
    parser = argparse.ArgumentParser(prog="slime-retool", description="Tools beside the training loop.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("doctor", help="what this host has of what a run needs; exit code 1 when something is missing")
    commands.add_parser("train", help="the same as python -m slime_retool.train", add_help=False)
    commands.add_parser("eval", help="measure a checkpoint, or a model behind an API", add_help=False)
    commands.add_parser("plan", help="memory and time of a run from its flags alone", add_help=False)
    commands.add_parser("data", help="`data check FILE...`: whether data files can be used", add_help=False)
    view = commands.add_parser("view", help="read dumped samples (--dump-rollouts) or evaluation transcripts")
    view.add_argument("file", type=Path, help="a .jsonl file below OUTPUT_DIR/rollouts or OUTPUT_DIR/eval")
    view.add_argument("--index", type=int, help="show only the sample with this index")
    view.add_argument("--limit", type=int, default=5, help="how many samples to show (default: %(default)s)")
    view.add_argument(
        "--wrong",
        action="store_true",
        help="only samples that an evaluation counts as wrong: by the reward's entry acc where it has one, else those "
        "whose reward is not above 0; and those without a reward",
    )
    view.add_argument("--reward-key", help="entry of a reward with several that is the reward (default: score)")
    sandbox = commands.add_parser("sandbox", help="the sandbox as a service")
    serve = sandbox.add_subparsers(dest="action", required=True).add_parser(
        "serve", help="speak SandboxFusion's /run_code; there is no authentication: keep it on a private address"
    )
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    serve.add_argument("--port", type=int, default=8080, help="port to listen on (default: %(default)s)")
    serve.add_argument("--isolation", choices=ISOLATION_LEVELS, default=ISOLATION_LEVELS[0], help="see docs/sandbox.md")
    serve.add_argument("--concurrency", type=int, default=16, help="calls that run at once (default: %(default)s)")
    args = parser.parse_args(arguments)
    if args.command == "sandbox":
        return serve_sandbox(args.host, args.port, args.isolation, args.concurrency)
    if args.command == "data":
        parser.error("the command is `slime-retool data check FILE...`")
    if args.command == "doctor":
        return doctor()
    return show(args.file, index=args.index, limit=args.limit, wrong=args.wrong, key=args.reward_key)


def doctor() -> int:
    """Print one line per requirement. Returns 1 when a required one is missing."""
    missing = 0
    print(f"{'python':<22}{sys.version.split()[0]}")
    for name in REQUIRED + OPTIONAL:
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            version = "missing" if name in REQUIRED else "not installed (optional)"
            missing += name in REQUIRED
        print(f"{name:<22}{version}")
    gpus = sorted(Path("/dev").glob("nvidia[0-9]*"))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    print(f"{'GPUs':<22}{len(gpus) or 'none: runs use the CPU and gloo'}")
    print(f"{'CPU cores':<22}{os.cpu_count()}")
    print(f"{'memory':<22}{memory / 1e9:.0f} GB")
    shared = Path("/dev/shm")
    if shared.is_dir():
        print(f"{'/dev/shm free':<22}{shutil.disk_usage(shared).free / 1e9:.1f} GB")
    if missing:
        print(f"\n{missing} required package(s) missing: run `make install` (CPU) or pip install -e '.[gpu]'")
    return int(missing > 0)


def serve_sandbox(host: str, port: int, isolation: str, concurrency: int) -> int:
    """Serve until interrupted. Returns 1 where the isolation level or the address cannot be had, 2 for a bad limit."""
    from slime_retool.sandbox.host.server import serve

    try:
        policy = SandboxPolicy(isolation, concurrency=concurrency)
        print(f"sandbox ({isolation}) on http://{host}:{port}/run_code", file=sys.stderr)
        serve(host, port, policy)
    except ConfigError as error:
        print(f"slime-retool sandbox serve: error: {error}", file=sys.stderr)
        return 2
    except (SandboxUnavailable, OSError, OverflowError) as error:
        print(f"slime-retool sandbox serve: error: {error}", file=sys.stderr)
        return 1
    return 0


def show(path: Path, *, index: int | None, limit: int, wrong: bool, key: str | None) -> int:
    """Print samples of a dump, one after the other. Returns 2 for a file that does not exist or is none."""
    if not path.is_file():
        print(f"slime-retool view: error: no such file: {path}", file=sys.stderr)
        return 2
    shown = 0
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        print(f"slime-retool view: error: {path} cannot be read: {error}", file=sys.stderr)
        return 2
    for number, line in enumerate(lines, start=1):
        if not line or shown >= limit:
            continue
        try:
            row = json.loads(line)
            text = sample_text(row, key)
        except (ValueError, LookupError, TypeError):
            if number == len(lines):  # still being written, or cut off when its run was killed
                continue
            print(
                f"slime-retool view: error: {path}, line {number} is no dumped sample; give a file below "
                "OUTPUT_DIR/rollouts (--dump-rollouts) or OUTPUT_DIR/eval",
                file=sys.stderr,
            )
            return 2
        if index is not None and row["index"] != index:
            continue
        try:
            if wrong and is_right(row, key):
                continue
        except ValueError as error:
            print(f"slime-retool view: error: {path}, line {number}: {error}", file=sys.stderr)
            return 2
        shown += 1
        print(text, flush=True)
    if not shown:
        print("no sample matches")
    return 0


def is_right(row: dict[str, Any], key: str | None) -> bool:
    """As evaluations count it. ValueError for a reward that does not tell."""
    sample = Sample(row["prompt"], row["label"], reward=row["reward"])
    return sample.reward is not None and eval_figures.is_right(sample, key)


def sample_text(row: dict[str, Any], key: str | None) -> str:
    """One dumped sample as a page. LookupError or TypeError for an object that is none."""
    reward, acc = row["reward"], ""
    if isinstance(reward, dict):
        acc = f"  acc {reward['acc']}" if "acc" in reward else ""
        reward = reward.get(key or "score", reward)
    head = f"sample {row['index']}  label {row['label']}  reward {reward}{acc}  {row['status']}"
    prompt, response = row["prompt"], row["response"]
    if not isinstance(prompt, str):
        prompt = "\n".join(f"[{m['role']}] {m.get('content', '')}" for m in prompt)
    return f"{'=' * 80}\n{head}\n{'-' * 80}\n{prompt}\n{'-' * 80}\n{response}"


if __name__ == "__main__":
    sys.exit(main())
