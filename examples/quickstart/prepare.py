"""Make the tiny model and its data, for trying any launch script on a CPU (MODEL=tiny).

    python examples/quickstart/prepare.py --output-dir DIR [--seed N]

Writes DIR/base (Hugging Face), DIR/base_torch_dist and DIR/data/{sft.parquet,rl.jsonl,eval.jsonl}.
What is there already is kept.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def write_inputs(out: Path, *, seed: int, sft_rows: int, rl_rows: int, eval_rows: int) -> None:
    """The model, OUT/base (Hugging Face), and its problems, OUT/data."""
    from base_model import write_base_model
    from traces import write_all

    write_base_model(out / "base", seed=seed)
    write_all(out / "data", seed, sft_rows, rl_rows, eval_rows)


def model_flags(out: Path) -> list[str]:
    """The tiny model's architecture as the flags a `scripts/models/*.sh` array would hold."""
    from megatron_bridge import flags
    from megatron_bridge.hf_config import model_args_from_hf

    return flags.to_flags(model_args_from_hf(json.loads((out / "base" / "config.json").read_text(encoding="utf-8"))))


def convert_command(out: Path) -> list[str]:
    """Converts OUT/base to OUT/base_torch_dist, also over what a stopped conversion left there."""
    return [
        sys.executable, str(ROOT / "tools" / "convert_hf_to_torch_dist.py"), *model_flags(out), "--force",
        "--hf-checkpoint", str(out / "base"), "--save", str(out / "base_torch_dist"),
    ]  # fmt: skip


def prepare(out: Path, *, seed: int, sft_rows: int, rl_rows: int, eval_rows: int) -> None:
    """Everything that a run on the tiny model starts from."""
    from megatron_bridge.checkpoint import exists

    if (out / "data" / "eval.jsonl").exists() and exists(out / "base_torch_dist"):
        return
    out.mkdir(parents=True, exist_ok=True)
    write_inputs(out, seed=seed, sft_rows=sft_rows, rl_rows=rl_rows, eval_rows=eval_rows)
    subprocess.run(convert_command(out), check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--sft-rows", type=int, default=64)
    parser.add_argument("--rl-rows", type=int, default=32)
    parser.add_argument("--eval-rows", type=int, default=8)
    args = parser.parse_args()
    prepare(
        args.output_dir, seed=args.seed, sft_rows=args.sft_rows, rl_rows=args.rl_rows, eval_rows=args.eval_rows
    )  # fmt: skip


if __name__ == "__main__":
    main()
