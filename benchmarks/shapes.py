"""Checkpoints of a model's shape with random weights, for benchmarks: free to ship, as fast as trained ones.

    python benchmarks/shapes.py --model qwen3-4B --output DIR

`--model` of every benchmark is a file of scripts/models, `tiny` or `tiny_moe`; NAME:LAYERS is the same with so many
layers (qwen3-30B-A3B:8).
"""

from __future__ import annotations

import argparse
import fcntl
import json
import math
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples" / "quickstart")]

if TYPE_CHECKING:
    from megatron_bridge.model_config import ModelArgs

TINY = [
    "--swiglu", "--num-layers", "2", "--hidden-size", "64", "--ffn-hidden-size", "128", "--num-attention-heads", "4",
    "--group-query-attention", "--num-query-groups", "2", "--kv-channels", "16", "--vocab-size", "1024",
    "--disable-bias-linear", "--normalization", "RMSNorm", "--norm-epsilon", "1e-6",
    "--use-rotary-position-embeddings", "--qk-layernorm",
]  # fmt: skip
TINY_MOE = [
    *TINY, "--num-experts", "4", "--moe-router-topk", "2", "--moe-ffn-hidden-size", "32",
    "--untie-embeddings-and-output-weights",  # SGLang's Qwen3-MoE has a head of its own in any case
]  # fmt: skip
INITIAL_STD = 0.02
"""Of every matrix, as Qwen's own initializer."""
SHARD_BYTES = 2 * 10**9


def model_flags(name: str) -> list[str]:
    """The MODEL_ARGS array of scripts/models/NAME.sh, with another --num-layers for NAME:LAYERS."""
    name, _, layers = name.partition(":")
    if name in (small := {"tiny": TINY, "tiny_moe": TINY_MOE}):
        flags = small[name]
    else:
        script = ROOT / "scripts" / "models" / f"{name}.sh"
        if not script.is_file():
            known = ", ".join(sorted(path.stem for path in script.parent.glob("*.sh")))
            raise SystemExit(f"--model: there is no {script.name}; known models: {', '.join(small)}, {known}")
        text = f'source "{script}"; printf "%s\\n" "${{MODEL_ARGS[@]}}"'
        flags = subprocess.run(["bash", "-c", text], check=True, capture_output=True, text=True).stdout.split()
    return [*flags, "--num-layers", layers] if layers else flags


def model_args(name: str) -> ModelArgs:
    """The same as the bridge's configuration."""
    from megatron_bridge.flags import OneLineParser, add_flags, from_namespace
    from megatron_bridge.model_config import ModelArgs

    parser = OneLineParser(prog="MODEL_ARGS")
    add_flags(parser, ModelArgs)
    return from_namespace(ModelArgs, parser.parse_args(model_flags(name)))


def write_checkpoint(folder: Path, name: str, *, seed: int = 0, shard_bytes: int = SHARD_BYTES) -> None:
    """A bf16 Qwen3 checkpoint of that shape in files of at most `shard_bytes` (one tensor at least), and the
    quickstart's tokenizer.

    Matrices are normal with deviation 0.02, norms are 1. One file is in memory at a time.
    """
    import torch
    from base_model import train_tokenizer
    from safetensors.torch import save_file
    from transformers import Qwen3Config, Qwen3MoeConfig

    from megatron_bridge.model_config import moe_layers

    model = model_args(name)
    assert model.qk_layernorm and not model.add_qkv_bias, "benchmarks use Qwen3 shapes"
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer()
    kind: type[Qwen3Config] | type[Qwen3MoeConfig] = Qwen3Config
    mixture: dict[str, Any] = {}
    if model.num_experts is not None:
        kind = Qwen3MoeConfig
        sparse = moe_layers(model)
        mixture = dict(
            num_experts=model.num_experts,
            num_experts_per_tok=model.moe_router_topk,
            moe_intermediate_size=model.moe_ffn_hidden_size,
            norm_topk_prob=not model.moe_router_pre_softmax,
            mlp_only_layers=[layer for layer, experts in enumerate(sparse) if not experts],
        )
    kind(
        **mixture,
        architectures=[kind.__name__.replace("Config", "ForCausalLM")],
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
    ).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    shards = split_shards(tensor_shapes(model), shard_bytes)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(seed)
    weight_map: dict[str, str] = {}
    for number, shapes in enumerate(shards):
        file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        tensors = {}
        for tensor_name, shape in shapes.items():
            value = torch.ones(shape, dtype=torch.bfloat16)
            if len(shape) > 1:
                drawn = torch.empty(shape, dtype=torch.bfloat16, device=device)
                value = drawn.normal_(std=INITIAL_STD, generator=generator).cpu()
            tensors[tensor_name] = value
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shapes, file)
    total = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def tensor_shapes(model: ModelArgs) -> dict[str, tuple[int, ...]]:
    """Every tensor of the HF checkpoint."""
    from megatron_bridge.layout import hf_shapes
    from megatron_bridge.names import megatron_names

    shapes: dict[str, tuple[int, ...]] = {}
    for name in megatron_names(model):
        shapes |= hf_shapes(name, model)
    return shapes


def split_shards(shapes: dict[str, tuple[int, ...]], shard_bytes: int) -> list[dict[str, tuple[int, ...]]]:
    """The tensors in order, in groups of at most `shard_bytes` at two bytes a value."""
    shards: list[dict[str, tuple[int, ...]]] = []
    room = 0
    for name, shape in shapes.items():
        size = 2 * math.prod(shape)
        if not shards or size > room:
            shards.append({})
            room = shard_bytes
        shards[-1][name] = shape
        room -= size
    return shards


def make_checkpoint(folder: Path, name: str, *, shard_bytes: int = SHARD_BYTES) -> None:
    """`write_checkpoint` in a process of its own, which leaves neither host nor GPU memory behind."""
    options = ["--model", name, "--output", str(folder), "--shard-bytes", str(shard_bytes)]
    subprocess.run([sys.executable, __file__, *options], check=True)


def convert(folder: Path, save: Path, name: str) -> None:
    """HF -> torch_dist by the product's tool."""
    tool = str(ROOT / "tools" / "convert_hf_to_torch_dist.py")
    command = [sys.executable, tool, *model_flags(name), "--force", "--hf-checkpoint", str(folder), "--save", str(save)]
    subprocess.run(command, check=True)


def prepare(folder: Path, name: str, *, converted: bool = True) -> Path:
    """`folder`/hf and, where `converted`, `folder`/torch_dist; returns `folder`.

    What an earlier call left there for the same model is used again. Benchmarks that run side by side may share the
    folder: the first one writes, the others wait.
    """
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for part, make in (("hf", make_checkpoint), ("torch_dist", _convert_beside)):
            done = folder / f"{part}.model"  # written last: holds the model's name
            if (part == "torch_dist" and not converted) or (done.is_file() and done.read_text() == name):
                continue
            done.unlink(missing_ok=True)
            begin = time.monotonic()
            make(folder / part, name)
            done.write_text(name)
            print(f"wrote {folder / part} in {time.monotonic() - begin:.0f} s", flush=True)
    return folder


def _convert_beside(save: Path, name: str) -> None:
    convert(save.parent / "hf", save, name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--shard-bytes", type=int, default=SHARD_BYTES)
    args = parser.parse_args()
    write_checkpoint(args.output, args.model, shard_bytes=args.shard_bytes)


if __name__ == "__main__":
    main()
