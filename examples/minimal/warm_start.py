"""Make the model that `rl_loop.py` starts from: a tiny Qwen3 that was shown how a tool is called.

    python examples/minimal/warm_start.py --output-dir DIR [--seed N] [--steps N]

RL strengthens what a model does now and then, and random weights never call a tool: so they learn first, by SFT, from
the quickstart's traces. Writes DIR/model (Hugging Face), and what it is made of beside it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megatron_bridge.convert import convert_hf_to_torch_dist, convert_torch_dist_to_hf
from slime_retool.chat import load_tokenizer
from slime_retool.config import parse_config, resolve, validate
from slime_retool.data.rows import samples_from_file
from slime_retool.errors import run_command
from slime_retool.rollout.sft_rollout import to_train_sample
from slime_retool.rollout.sft_tokens import ConversationTokenizer
from slime_retool.trainer.core import Trainer
from slime_retool.types import RolloutBatch

ROWS, BATCH = 6400, 32
STEPS = 400


def warm_start(out: Path, *, seed: int, steps: int = STEPS) -> Path:
    """The Hugging Face checkpoint OUT/model; one that is there already is kept."""
    model = out / "model"
    if model.exists():
        return model
    sys.path.append(str(Path(__file__).resolve().parents[1] / "quickstart"))
    from prepare import write_inputs

    base, torch_dist, saved = out / "base", out / "torch_dist", out / "sft"
    write_inputs(out, seed=seed, sft_rows=ROWS, rl_rows=1, eval_rows=1)
    config = resolve(parse_config([
        "--device", "cpu", "--seed", str(seed), "--hf-checkpoint", str(base), "--ref-load", str(torch_dist),
        "--save", str(saved), "--no-save-optim", "--prompt-data", str(out / "data" / "sft.parquet"),
        "--input-key", "messages", "--loss-type", "sft_loss", "--calculate-per-token-loss", "--num-rollout", str(steps),
        "--rollout-batch-size", str(BATCH), "--use-dynamic-batch-size", "--max-tokens-per-gpu", "8192", "--lr", "4e-3",
        "--min-lr", "4e-4", "--lr-decay-style", "cosine", "--lr-warmup-fraction", "0.05", "--weight-decay", "0",
        "--adam-beta2", "0.95",
    ]))  # fmt: skip
    convert_hf_to_torch_dist(config, base, torch_dist, force=True, progress=False)
    validate(config)
    tokenize = ConversationTokenizer(config.tool_format, load_tokenizer(base))
    rows = samples_from_file(config.prompt_data[0], config)
    trainer = Trainer(config, rank=0, world_size=1, local_rank=0, init_method="tcp://127.0.0.1:0")
    try:
        trainer.load()
        for step in range(steps):
            chosen = [rows[index % ROWS] for index in range(BATCH * step, BATCH * (step + 1))]
            batch = RolloutBatch([to_train_sample(tokenize, row) for row in chosen])
            loss = trainer.train(batch, step)["train/loss"]
            if step % 50 == 0 or step == steps - 1:
                print(f"supervised step {step}: loss {loss:.3f}", flush=True)
        trainer.save(steps - 1, {})
    finally:
        trainer.shutdown()
    convert_torch_dist_to_hf(saved, model, base, progress=False)
    return model


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=STEPS, help="default: %(default)s")
    args = parser.parse_args()
    print(warm_start(args.output_dir.resolve(), seed=args.seed, steps=args.steps))
    return 0


if __name__ == "__main__":
    sys.exit(run_command("warm_start.py", main))
