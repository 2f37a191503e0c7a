"""TRL's GRPOTrainer for equal work: every answer has the same number of tokens, and each rollout two optimizer steps.

    python benchmarks/peers/trl_step.py --model DIR --prompt-data FILE --output FILE --length N [--steps N] ...

`--prompt-data` is what equal_work.py wrote for us. Generation is transformers' continuous batching, which is what TRL
has where vLLM is not installed. `--output` gets a line for each rollout, in the form of verl's logger `file`: seconds
by TRL's own profiling, the whole step by the clock between two rollouts.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MICRO_BATCH = 32
"""Samples. TRL pads: 32 of up to 512 tokens are about as many as our micro-batches of 16,384 tokens hold."""
GENERATE = "GRPOTrainer.transformers.generate_batch"
LENGTHS = ("completions/min_length", "completions/max_length")
LOG_PROBS = "GRPOTrainer._get_per_token_logps_and_entropies"


class RolloutTimes:
    """Seconds of each rollout, into a file."""

    def __init__(self, path: Path, optimizer_steps: int) -> None:
        self._path, self._optimizer_steps = path, optimizer_steps
        self._parts: dict[str, float] = defaultdict(float)
        self._begin = time.perf_counter()

    def add(self, name: str, seconds: float, *, in_loss: bool) -> None:
        """One of TRL's own measurements. What the loss computes belongs to training."""
        if name == GENERATE:
            self._parts["timing_s/gen"] += seconds
        elif name == LOG_PROBS and not in_loss:
            self._parts["timing_s/old_log_prob"] += seconds

    def end_of_optimizer_step(self, number: int) -> None:
        """After optimizer step `number`, counted from 1."""
        if number % self._optimizer_steps:
            return
        now = time.perf_counter()
        step = now - self._begin
        row = {**self._parts, "timing_s/step": step, "timing_s/update_actor": step - sum(self._parts.values())}
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps({"step": number // self._optimizer_steps, "data": row}) + "\n")
        self._parts.clear()
        self._begin = now


def parity(completions: Sequence[Any], **_: Any) -> list[float]:
    """The reward of limited.py."""
    return [float(len(completion[0]["content"]) % 2) for completion in completions]


def train(args: argparse.Namespace) -> None:
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer
    from trl.extras import profiling

    batch = args.prompts * args.samples
    optimizer_steps = 2
    micro_batch = min(MICRO_BATCH, batch // optimizer_steps)
    times = RolloutTimes(args.output, optimizer_steps)

    def sink(context: profiling.ProfilingContext, seconds: float) -> None:
        times.add(context.name, seconds, in_loss=torch.is_grad_enabled())

    profiling.ProfilingContext._log_metrics = sink

    class Clock(TrainerCallback):
        def on_step_end(self, _: Any, state: Any, control: Any, **__: Any) -> None:
            if args.device == "cuda":
                torch.cuda.synchronize()
            times.end_of_optimizer_step(state.global_step)

    rows = [json.loads(line) for line in args.prompt_data.read_text(encoding="utf-8").splitlines()]
    config = GRPOConfig(
        output_dir=str(args.output.parent / "trl"),
        model_init_kwargs={"dtype": "float32", "attn_implementation": args.attention},
        use_cpu=args.device == "cpu",
        bf16=args.device == "cuda",
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=batch // optimizer_steps // micro_batch,
        steps_per_generation=batch // micro_batch,
        max_steps=args.steps * optimizer_steps,
        num_generations=args.samples,
        max_completion_length=args.length,
        use_transformers_continuous_batching=True,
        generation_kwargs={"eos_token_id": -1},  # the end of text is ignored
        beta=0.0,
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        gradient_checkpointing=False,
        shuffle_dataset=False,
        save_strategy="no",
        report_to="none",
        logging_steps=1,
    )
    trainer = GRPOTrainer(
        model=str(args.model),
        args=config,
        reward_funcs=parity,
        train_dataset=Dataset.from_list([{"prompt": row["prompt"]} for row in rows]),
        callbacks=[Clock()],
    )
    trainer.train()
    lengths = {row[name] for row in trainer.state.log_history for name in LENGTHS if name in row}
    if lengths != {args.length}:
        raise SystemExit(f"answers had {sorted(lengths)} tokens, not {args.length}: the work was not equal")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--prompt-data", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--length", type=int, required=True, help="tokens of every answer")
    parser.add_argument("--steps", type=int, default=8, help="rollouts")
    parser.add_argument("--prompts", type=int, default=64, help="of a step")
    parser.add_argument("--samples", type=int, default=8, help="of a prompt")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--attention", default="sdpa", help="transformers' attn_implementation")
    args = parser.parse_args()
    args.output.unlink(missing_ok=True)
    train(args)


if __name__ == "__main__":
    main()
