"""Real RL steps of a model shape with random weights: does every part work on these devices, and how long does it take?

    python benchmarks/rl_step.py --model qwen3-0.6B --rollouts 4 [--output FILE] -- FLAGS OF slime_retool.train

Random weights cost nothing to ship and generate as slowly as trained ones. The checkpoint is written and converted,
then `python -m slime_retool.train` runs with the flags after `--` (devices, parallel sizes, SGLang's own). Prints one
JSON object: medians over all rollouts but the first of each phase's seconds, tokens per second, and the mean
difference between the trainer's and the engine's log-probs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples" / "quickstart")]

REPORTED = (
    "perf/generate_seconds", "perf/log_probs_seconds", "perf/train_seconds", "perf/sync_seconds",
    "perf/offload_seconds", "perf/idle_seconds", "perf/step_seconds", "rollout/tokens_per_second",
    "rollout/cached_token_ratio", "perf/train_tokens_per_second", "train/logprob_abs_diff", "train/grad_norm",
)  # fmt: skip


def model_flags(name: str) -> list[str]:
    """The MODEL_ARGS array of scripts/models/NAME.sh."""
    script = ROOT / "scripts" / "models" / f"{name}.sh"
    if not script.is_file():
        known = ", ".join(sorted(path.stem for path in script.parent.glob("*.sh")))
        raise SystemExit(f"--model: there is no {script.name}; known models: {known}")
    text = f'source "{script}"; printf "%s\\n" "${{MODEL_ARGS[@]}}"'
    return subprocess.run(["bash", "-c", text], check=True, capture_output=True, text=True).stdout.split()


def write_checkpoint(folder: Path, flags: list[str]) -> None:
    """A Qwen3 checkpoint of that shape with random bf16 weights, and the quickstart's tokenizer."""
    import torch
    from base_model import train_tokenizer
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from megatron_bridge.flags import OneLineParser, add_flags, from_namespace
    from megatron_bridge.model_config import ModelArgs

    parser = OneLineParser(prog="MODEL_ARGS")
    add_flags(parser, ModelArgs)
    model = from_namespace(ModelArgs, parser.parse_args(flags))
    tokenizer = train_tokenizer()
    config = Qwen3Config(
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        intermediate_size=model.ffn_hidden_size,
        num_hidden_layers=model.num_layers,
        num_attention_heads=model.num_attention_heads,
        num_key_value_heads=model.num_query_groups,
        head_dim=model.kv_channels,
        rms_norm_eps=model.norm_epsilon,
        max_position_embeddings=40960,
        rope_parameters={"rope_type": "default", "rope_theta": float(model.rotary_base)},
        tie_word_embeddings=not model.untie_embeddings_and_output_weights,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="bfloat16",
    )
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def run(args: argparse.Namespace) -> dict[str, Any]:
    from traces import build_prompt_rows, write_jsonl

    flags, work = model_flags(args.model), args.work
    work.mkdir(parents=True, exist_ok=True)
    write_checkpoint(work / "hf", flags)
    write_jsonl(build_prompt_rows("rl", args.prompts * args.rollouts, seed=0), work / "prompts.jsonl")
    convert = [sys.executable, str(ROOT / "tools" / "convert_hf_to_torch_dist.py"), *flags, "--force"]
    folders = [ROOT, ROOT / "examples" / "retool", ROOT / "benchmarks", os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(str(folder) for folder in folders if folder)}
    subprocess.run([*convert, "--hf-checkpoint", work / "hf", "--save", work / "torch_dist"], check=True, env=env)
    train = [
        sys.executable, "-m", "slime_retool.train", *flags,
        "--hf-checkpoint", work / "hf", "--ref-load", work / "torch_dist", "--prompt-data", work / "prompts.jsonl",
        "--custom-generate-function-path", "generate_with_retool.generate",
        "--custom-rm-path", "rl_step_hooks.alternating_reward", "--num-rollout", args.rollouts,
        "--rollout-batch-size", args.prompts, "--n-samples-per-prompt", args.samples,
        "--rollout-max-response-len", args.response, "--rollout-max-context-len", args.response + 1024,
        "--use-dynamic-batch-size", "--max-tokens-per-gpu", args.max_tokens, "--output-dir", work / "run",
        "--no-progress", *args.flags,
    ]  # fmt: skip
    subprocess.run([str(part) for part in train], check=True, env=env, timeout=args.timeout)
    from slime_retool.observe.metrics import read_metrics

    rows = [row for row in read_metrics(work / "run" / "metrics.jsonl") if "train/loss" in row]
    steady = rows[1:] or rows
    figures = {
        name: statistics.median(row[name] for row in steady) for name in REPORTED if all(name in row for row in steady)
    }
    first = {
        f"first/{name}": rows[0][name] for name in ("perf/sync_seconds", "perf/offload_seconds", "perf/step_seconds")
    }
    return {"model": args.model, "flags": args.flags, "rollouts": len(rows), **figures, **first}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-0.6B", help="a file of scripts/models (a Qwen3 shape)")
    parser.add_argument("--rollouts", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--response", type=int, default=512, help="tokens of one response")
    parser.add_argument("--max-tokens", type=int, default=16384, help="tokens of one packed micro-batch")
    parser.add_argument("--work", type=Path, default=Path("outputs/bench_rl_step"), help="scratch folder")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds the training run may take")
    parser.add_argument("--output", type=Path, help="also write the JSON here")
    parser.add_argument("flags", nargs="*", help="after --: flags of slime_retool.train")
    args = parser.parse_args()
    args.work = args.work.resolve()
    result = json.dumps(run(args), indent=2)
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(result + "\n")
    print(result)


if __name__ == "__main__":
    main()
