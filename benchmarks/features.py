"""What the trainer can do, each once on a card: does it compute what the CPU computes in fp32?

    python benchmarks/features.py                          # every case that the visible GPUs have room for
    python benchmarks/features.py --cases lora moe ppo
    python benchmarks/features.py --share-gpu              # layouts of several ranks too, on one card
    python benchmarks/features.py --device cpu             # that the script works; only the CPU's layouts differ

CI has no GPU: it checks algorithms, layouts and layers on the CPU. This is where the same code meets cuBLAS, NCCL,
Transformer Engine, flash-attn-4 and the fused kernels, in bf16, for a minute or two. A tiny Qwen3 model (with or
without experts) with random weights takes `--steps` optimizer steps on random samples; the same steps are taken by one
process on the CPU, in fp32, for every task. Three numbers for each case:

- `forward`: mean |log-prob - the CPU's| of all learned tokens before the first step, in nats
- `gradient`: the first step's gradient norm, off by so many percent
- `steps`: mean |change of a log-prob by the steps - the CPU's change|, in percent of the CPU's mean |change|

A case passes within `--forward`, `--gradient` and `--after`, which bf16 stays well below and a wrong operand does not.
Cases run side by side, those of one rank several on a GPU; one that fails costs no other, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.ranks import (
    NO_GPU,
    Sizes,
    add_rank_options,
    add_share_option,
    make_trainer,
    places,
    run_ranks,
    side_by_side,
)

VOCAB_SIZE = 1000
FULL = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")
SP = ("--sequence-parallel",)
TASKS: dict[str, tuple[str, ...]] = {
    "grpo": (),
    "kl": ("--use-kl-loss", "--kl-loss-coef", "0.1"),
    "ppo": ("--advantage-estimator", "ppo"),
    "lora": ("--lora-rank", "8", "--lr", "1e-2"),  # its B is zero: at 1e-3 the steps move little more than bf16 does
    "sft": ("--loss-type", "sft_loss"),
    "moe": (),
}
"""What is computed, by the flags that say so; `moe` by another model."""


@dataclass(frozen=True)
class Case(Sizes):
    """A task done in one way.

    turns: between steps everything leaves the card and returns.
    resumes: after each step all is saved, the weights are lost, and the checkpoint is loaded.
    """

    name: str
    task: str = "grpo"
    flags: tuple[str, ...] = ()
    turns: bool = False
    resumes: bool = False


CASES = {
    case.name: case
    for case in (
        *(Case(task, task) for task in TASKS),
        Case("local", flags=("--transformer-impl", "local")),
        Case("flash", flags=("--attention-backend", "flash")),
        Case("fused", flags=("--attention-backend", "fused")),
        Case("recompute", flags=FULL),
        Case("selective", flags=("--recompute-granularity", "selective")),
        Case("kept_logits", flags=("--keep-logits-gib", "1")),
        Case("optimizer_bits", flags=("--use-precision-aware-optimizer",)),
        Case("optimizer_on_host", flags=("--optimizer-cpu-offload",)),
        Case("turns", turns=True),
        Case("ppo_turns", "ppo", turns=True),
        Case("resumed", resumes=True),
        Case("ppo_resumed", "ppo", resumes=True),
        Case("moe_resumed", "moe", resumes=True),
        Case("moe_local", "moe", flags=("--transformer-impl", "local")),
        Case("moe_recompute", "moe", flags=FULL),
        Case("tp2", tp=2, flags=SP),
        Case("pp2", pp=2),
        Case("cp2", cp=2),
        Case("dp2", dp=2, flags=("--overlap-grad-reduce", "--overlap-param-gather")),
        Case("ppo_tp2", "ppo", tp=2, flags=SP),
        Case("ppo_pp2", "ppo", pp=2),
        Case("ppo_cp2", "ppo", cp=2),
        Case("kl_tp2", "kl", tp=2, flags=SP),
        Case("lora_tp2", "lora", tp=2, flags=SP),
        Case("moe_ep2", "moe", dp=2, ep=2),
        Case("moe_tp2", "moe", tp=2, flags=SP),
        Case("moe_tp2_ep2", "moe", tp=2, ep=2, flags=SP),
        Case("moe_cp2", "moe", cp=2),
        Case("dp2_resumed", dp=2, resumes=True),
        Case("moe_ep2_resumed", "moe", dp=2, ep=2, resumes=True),
    )
}
GPU_ONLY = ("flash", "fused", "dp2", "dp2_resumed", "optimizer_bits", "optimizer_on_host")
"""What the CPU's trainer does not take."""


@dataclass(frozen=True)
class Curve:
    """One run. log_probs: of all learned tokens, before the first step and after the last."""

    before: list[float]
    after: list[float]
    grad_norms: list[float]

    def change(self) -> list[float]:
        return [after - before for after, before in zip(self.after, self.before, strict=True)]


@dataclass(frozen=True)
class Difference:
    """From the CPU's curve; see the module's docstring."""

    forward: float
    gradient: float
    steps: float

    @classmethod
    def between(cls, curve: Curve, reference: Curve) -> Difference:
        moved = _mean_distance(reference.after, reference.before)
        assert moved > 0.1, f"the steps moved the reference's log-probs by {moved} nats only"
        change, expected = curve.change(), reference.change()
        return cls(
            _mean_distance(curve.before, reference.before),
            100 * abs(curve.grad_norms[0] / reference.grad_norms[0] - 1),
            100 * _mean_distance(change, expected) / moved,
        )


def _mean_distance(a: Sequence[float], b: Sequence[float]) -> float:
    return sum(abs(x - y) for x, y in zip(a, b, strict=True)) / len(a)


def write_models(folder: Path) -> None:
    """folder/dense and folder/moe: random Qwen3 checkpoints, converted, with their flags."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    from megatron_bridge.convert import convert_hf_to_torch_dist
    from megatron_bridge.flags import to_flags
    from megatron_bridge.hf_config import model_args_from_hf, read_hf_config

    shape: dict[str, Any] = dict(
        hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=64, vocab_size=VOCAB_SIZE, max_position_embeddings=1024, initializer_range=0.06,
        tie_word_embeddings=False, rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )  # fmt: skip
    experts: dict[str, Any] = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=256, norm_topk_prob=True)
    torch.manual_seed(0)
    models = {
        "dense": Qwen3ForCausalLM(Qwen3Config(**shape)),
        "moe": Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, **experts)),
    }
    for name, model in models.items():
        # Rounded first, so that both precisions start from the same weights.
        model.to(torch.bfloat16).save_pretrained(folder / name / "hf")
        args = model_args_from_hf(read_hf_config(folder / name / "hf"))
        convert_hf_to_torch_dist(args, folder / name / "hf", folder / name / "torch_dist", progress=False)
        (folder / name / "flags.json").write_text(json.dumps(to_flags(args)))


def make_samples(seed: int) -> list[Any]:
    """24 samples of 9 to 200 tokens in groups of 4, most of them learned, all of them rewarded by chance."""
    from slime_retool.types import TrainSample

    rng = random.Random(seed)
    samples = []
    for index in range(24):
        length = rng.randint(9, 200)
        prompt = rng.randint(1, length // 2)
        samples.append(
            TrainSample(
                tokens=rng.choices(range(VOCAB_SIZE), k=length),
                loss_mask=[int(t >= prompt and t % 17 > 2) for t in range(length)],
                reward=rng.uniform(-1, 1),
                index=index,
                group_index=index // 4,
            )
        )
    return samples


def run_rank(case: Case, args: argparse.Namespace) -> Curve:
    from slime_retool.config import parse_config
    from slime_retool.trainer.offload import TrainerMemory
    from slime_retool.types import RolloutBatch

    folder = args.models / ("moe" if case.task == "moe" else "dense")
    flags = [
        *json.loads((folder / "flags.json").read_text()),
        "--device", args.device, "--ref-load", str(folder / "torch_dist"), "--rollout-batch-size", "6",
        "--n-samples-per-prompt", "4", "--lr", "1e-3", "--use-dynamic-batch-size", "--max-tokens-per-gpu", "600",
        "--num-rollout", str(args.steps), *TASKS[case.task], *case.flags, *case.size_flags(),
        *(folder_flags(args.models / case.name, case.task) if case.resumes else []),
    ]  # fmt: skip
    trainer = make_trainer(parse_config(flags), args)
    trainer.load()
    memory = TrainerMemory(trainer)
    probe = make_samples(seed=0)
    learned = [bit for sample in probe for bit in sample.loss_mask]

    def log_probs() -> list[float]:
        return [value for value, bit in zip(trainer.log_probs(probe).tolist(), learned, strict=True) if bit]

    before = log_probs()
    grad_norms = []
    for number in range(args.steps):
        if case.turns:
            memory.offload()
            memory.reload()
        grad_norms.append(trainer.train(RolloutBatch(make_samples(seed=number)), number)["train/grad_norm"])
        if case.resumes:
            trainer.save(number, {})
            lose_weights(trainer)
            assert trainer.load() == (number + 1, {})
    curve = Curve(before, log_probs(), grad_norms)
    trainer.shutdown()
    return curve


def folder_flags(folder: Path, task: str) -> list[str]:
    """Where a case saves and resumes."""
    flags = ["--save", str(folder), "--load", str(folder)]
    critic = str(folder / "critic")
    return [*flags, "--critic-save", critic, "--critic-load", critic] if task == "ppo" else flags


def lose_weights(trainer: Any) -> None:
    import torch

    with torch.no_grad():
        for role in trainer.roles:
            for parameter in role.module.parameters():
                parameter.zero_()


def run_case(case: Case, args: argparse.Namespace, device: str, gpus: Sequence[str]) -> dict[str, Any]:
    """The curve's fields, or {"error": why}."""
    options = {"--worker": json.dumps(asdict(case)), "--device": device, "--models": args.models, "--steps": args.steps}
    words = [str(word) for pair in options.items() for word in pair]
    return run_ranks([sys.executable, __file__, *words], case.world_size, args.timeout, gpus)


def run_all(args: argparse.Namespace, cases: Mapping[str, Case]) -> int:
    """Prints a row for every case; the number of those that failed."""
    write_models(args.models)
    tasks = sorted({case.task for case in cases.values()})
    references: dict[str, dict[str, Any]] = {}
    slots = [str(slot) for slot in range(args.cpu_processes)]
    side_by_side(
        dict.fromkeys(tasks, 1),
        slots,
        lambda task, _: references.update({task: run_case(Case(task, task), args, "cpu", NO_GPU)}),
    )
    for task, curve in references.items():
        if "error" in curve:
            raise SystemExit(f"features: the reference of {task} on the CPU failed: {curve['error']}")
    failed: list[str] = []
    print(f"{'case':<20}{'forward':>10}{'gradient':>10}{'steps':>8}", flush=True)

    def run(name: str, gpus: list[str]) -> None:
        case = cases[name]
        figures = run_case(case, args, args.device, gpus if args.device == "cuda" else NO_GPU)
        if "error" in figures:
            failed.append(name)
            print(f"{name:<20}failed: {figures['error']}", flush=True)
            return
        found = Difference.between(Curve(**figures), Curve(**references[case.task]))
        good = found.forward <= args.forward and found.gradient <= args.gradient and found.steps <= args.after
        if not good or not math.isfinite(found.forward + found.gradient + found.steps):
            failed.append(name)
        verdict = "" if name not in failed else "  differs"
        print(f"{name:<20}{found.forward:>10.1e}{found.gradient:>9.2f}%{found.steps:>7.1f}%{verdict}", flush=True)

    on_gpu = args.device == "cuda"
    single = {name: 1 for name, case in cases.items() if case.world_size == 1}
    wide = {name: case.world_size for name, case in cases.items() if case.world_size > 1}
    side_by_side(single, places(share_gpu=True) if on_gpu else slots, run)
    for name, why in side_by_side(wide, places(args.share_gpu) if on_gpu else slots, run).items():
        print(f"{name:<20}left out: {why}", flush=True)
    print(f"failed: {', '.join(failed)}" if failed else "all within bounds", flush=True)
    return len(failed)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=sorted(CASES), help="default: all that the device can run")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--forward", type=float, default=0.03, help="nats that log-probs may be off before the steps")
    parser.add_argument("--gradient", type=float, default=5.0, help="percent that the gradient norm may be off")
    parser.add_argument("--after", type=float, default=12.0, help="percent of the change that the steps may be off")
    parser.add_argument("--cpu-processes", type=int, default=2, help="processes at once on the CPU")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds of one case")
    add_share_option(parser)
    add_rank_options(parser)
    parser.add_argument("--models", type=Path, help=argparse.SUPPRESS)
    return parser


def main() -> int:
    args = build_parser().parse_args()
    if args.worker:
        fields = json.loads(args.worker)
        curve = run_rank(Case(**{**fields, "flags": tuple(fields["flags"])}), args)
        if args.rank == 0:
            Path(args.result).write_text(json.dumps(asdict(curve)))
        return 0
    names = args.cases or [name for name in CASES if args.device == "cuda" or name not in GPU_ONLY]
    with tempfile.TemporaryDirectory(prefix="features-") as folder:
        args.models = Path(folder)
        return 1 if run_all(args, {name: CASES[name] for name in names}) else 0


if __name__ == "__main__":
    sys.exit(main())
