"""Exact metrics of training on fixed samples, so that two commits can be compared bit by bit. CPU, under a minute.

    python benchmarks/fixed_metrics.py --out before.json       # at one commit
    python benchmarks/fixed_metrics.py --compare before.json   # at another: exit code 1 and a list of what differs

Every case trains a tiny Qwen3 (two layers of width 32, fp32) for a few rollouts of the same samples with the flags
below, in a process of its own. What is compared are all metrics of all steps, as hexadecimal floats, and a SHA-256 of
each model's final parameters; seconds, rates and memory are left out. Equal on one machine and one set of packages
only: another BLAS rounds differently.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

VOCAB_SIZE = 67
ROLLOUTS = 4
SHAPE = (
    "--num-layers 2 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 4 --group-query-attention "
    f"--num-query-groups 2 --kv-channels 8 --vocab-size {VOCAB_SIZE} --make-vocab-size-divisible-by 16 "
    "--max-position-embeddings 64 --swiglu --disable-bias-linear --qk-layernorm --normalization RMSNorm "
    "--norm-epsilon 1e-6 --use-rotary-position-embeddings --device cpu --rollout-batch-size 4 "
    "--n-samples-per-prompt 3 --lr 1e-2 --use-dynamic-batch-size --max-tokens-per-gpu 40 --seed 7"
).split()
CASES = {
    "sft": "--loss-type sft_loss",
    "grpo": "--advantage-estimator grpo",
    "gspo": "--advantage-estimator gspo --eps-clip 3e-4 --eps-clip-high 4e-4 --global-batch-size 6",
    "ppo": "--advantage-estimator ppo --lambd 0.95 --normalize-advantages --num-critic-only-steps 1 --kl-coef 0.01",
    "cispo": "--advantage-estimator cispo --eps-clip 1 --eps-clip-high 0.28 --global-batch-size 6",
    "rloo": "--advantage-estimator rloo --calculate-per-token-loss",
    "reinforce_plus_plus": "--advantage-estimator reinforce_plus_plus --gamma 0.99 --kl-coef 0.05 --kl-loss-type k2",
    "reinforce_plus_plus_baseline": "--advantage-estimator reinforce_plus_plus_baseline",
    "grpo_all_terms": (
        "--use-kl-loss --kl-loss-coef 0.1 --kl-loss-type low_var_kl --entropy-coef 0.01 --use-tis --tis-clip 1.5 "
        "--eps-clip-c 3 --global-batch-size 4 --calculate-per-token-loss"
    ),
    "dr_grpo": "--disable-grpo-std-normalization --loss-constant-length 20 --use-rollout-logprobs",
    "distillation": "--teacher-url http://127.0.0.1:1 --distill-coef 0.5",
    "lora": "--lora-rank 4 --use-kl-loss --kl-loss-coef 0.1 --kl-loss-type k3",
}


def samples(case: str, rollout_id: int) -> list[Any]:
    """Twelve samples of 3 to 20 tokens in groups of three, one of them without learned tokens."""
    from slime_retool.types import TrainSample

    rng = random.Random(rollout_id)
    made = []
    for index in range(12):
        mask = [0] + [int(index != 1 and rng.random() < 0.6) for _ in range(rng.randint(2, 19))]
        sample = TrainSample(
            tokens=[rng.randrange(VOCAB_SIZE) for _ in mask],
            loss_mask=mask,
            rollout_log_probs=None if case == "sft" else [-rng.uniform(3, 5) * m for m in mask],
            reward=rng.choice([-1.0, 1.0, 0.5]),
            index=index,
            group_index=index // 3,
        )
        if case == "distillation":
            give_teacher_log_probs(sample, [-rng.uniform(3, 5) * m for m in mask])
        made.append(sample)
    return made


def give_teacher_log_probs(sample: Any, log_probs: list[float]) -> None:
    from array import array

    sample.columns["teacher_log_probs"] = array("f", log_probs)


def make_trainer(folder: Path, flags: list[str]) -> Any:
    from slime_retool.config import parse_config
    from slime_retool.trainer.core import Trainer

    meeting = tempfile.mktemp(dir=folder)
    return Trainer(
        parse_config([*SHAPE, *flags]), rank=0, world_size=1, local_rank=0, init_method=f"file://{meeting}"
    )


def digest(module: Any) -> str:
    """SHA-256 of all parameters, by name."""
    found = hashlib.sha256()
    for name, parameter in sorted(module.named_parameters()):
        found.update(name.encode() + parameter.detach().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()


def train(case: str, base: Path) -> dict[str, Any]:
    """Metrics of every rollout of a case, and what became of its models."""
    from slime_retool.types import RolloutBatch

    trainer = make_trainer(base, ["--ref-load", str(base / "weights"), *CASES[case].split()])
    trainer.load()
    steps = []
    for rollout_id in range(ROLLOUTS):
        metrics = trainer.train(RolloutBatch(samples(case, rollout_id)), rollout_id)
        kept = {name: value for name, value in metrics.items() if not name.startswith(("perf/", "memory/"))}
        steps.append({name: float(value).hex() for name, value in sorted(kept.items())})
    models = {type(role).__name__: digest(role.module) for role in trainer.roles}
    trainer.shutdown()
    return {"steps": steps, "parameters": models}


def run_child(*arguments: str) -> str:
    # Threads would share one sum among them in another order.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, __file__, *arguments]
    return subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """One line for each value that differs."""
    found = []
    for case in sorted(before.keys() | after.keys()):
        if case not in before or case not in after:
            found.append(f"{case}: only {'before' if case in before else 'after'}")
            continue
        old, new = before[case], after[case]
        for step, (one, other) in enumerate(zip(old["steps"], new["steps"], strict=True)):
            for name in sorted(one.keys() | other.keys()):
                if one.get(name) != other.get(name):
                    found.append(f"{case}, rollout {step}, {name}: {one.get(name)} -> {other.get(name)}")
        if old["parameters"] != new["parameters"]:
            found.append(f"{case}: the trained parameters differ")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write all metrics here, as JSON")
    parser.add_argument("--compare", type=Path, metavar="FILE", help="compare with what --out wrote")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--child", nargs=2, metavar=("CASE", "FOLDER"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        case, folder = args.child[0], Path(args.child[1])
        if case == "base":
            trainer = make_trainer(folder, ["--save", str(folder / "weights"), "--no-save-optim"])
            trainer.save(0, {})
            trainer.shutdown()
        else:
            print(json.dumps(train(case, folder)))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        run_child("--child", "base", folder)
        found = {case: json.loads(run_child("--child", case, folder).splitlines()[-1]) for case in args.cases}
    if args.out is not None:
        args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if args.compare is None:
        return 0
    before = json.loads(args.compare.read_text(encoding="utf-8"))
    lines = differences({case: before[case] for case in args.cases if case in before}, found)
    rollouts = sum(len(case["steps"]) for case in found.values())
    print("\n".join(lines) or f"bit-equal: {rollouts} rollouts of {len(found)} cases")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
