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

from base_model import write_base_model
from traces import write_all

from megatron_bridge import flags
from megatron_bridge.hf_config import model_args_from_hf

ROOT = Path(__file__).resolve().parents[2]
TRACKER = "latest_checkpointed_iteration.txt"
"""The last file of a torch_dist checkpoint to be written."""


def prepare(out: Path, *, seed: int, sft_rows: int, rl_rows: int, eval_rows: int) -> None:
    """Everything that a run on the tiny model starts from."""
    out.mkdir(parents=True, exist_ok=True)
    if not (out / "data" / "eval.jsonl").exists():
        write_all(out / "data", seed, sft_rows, rl_rows, eval_rows)
    if (out / "base_torch_dist" / TRACKER).exists():
        return
    write_base_model(out / "base", seed=seed)
    model = model_args_from_hf(json.loads((out / "base" / "config.json").read_text(encoding="utf-8")))
    convert = [
        sys.executable, str(ROOT / "tools" / "convert_hf_to_torch_dist.py"), *flags.to_flags(model), "--force",
        "--hf-checkpoint", str(out / "base"), "--save", str(out / "base_torch_dist"),
    ]  # fmt: skip
    subprocess.run(convert, check=True)


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
