"""Tiny random Hugging Face models that the bridge tests convert."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

_COMMON = dict(
    hidden_size=32,
    intermediate_size=48,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=101,  # odd: needs padding at every tensor-parallel size
    max_position_embeddings=256,
    rms_norm_eps=1e-6,
    initializer_range=0.2,  # large enough that a mistake moves the logits well above 1e-4
)

KINDS = ("qwen2", "qwen3", "llama", "qwen3_moe", "qwen3_mixed")
DENSE_KINDS = KINDS[:3]


def tiny_model(kind: str) -> torch.nn.Module:
    """Three layers. qwen2: biases, tied. qwen3: head norms, wide heads, untied. llama: scaled rotary, tied, MHA.

    qwen3_moe: 6 experts, 3 per token, weights of the chosen normalised. qwen3_mixed: experts in layers 0 and 2 only,
    not normalised, tied.
    """
    torch.manual_seed(KINDS.index(kind))
    if kind == "qwen2":
        model = Qwen2ForCausalLM(
            Qwen2Config(
                **_COMMON, num_hidden_layers=3, tie_word_embeddings=True,
                rope_parameters={"rope_type": "default", "rope_theta": 20000.0},
            )
        )  # fmt: skip
    elif kind == "qwen3":
        model = Qwen3ForCausalLM(
            Qwen3Config(
                **_COMMON, num_hidden_layers=3, head_dim=16, tie_word_embeddings=False,
                rope_parameters={"rope_type": "default", "rope_theta": 5000000.0},
            )
        )  # fmt: skip
    elif kind.startswith("qwen3_m"):
        mixed = kind == "qwen3_mixed"
        model = Qwen3MoeForCausalLM(
            Qwen3MoeConfig(
                **_COMMON, num_hidden_layers=3, head_dim=16, tie_word_embeddings=mixed, num_experts=6,
                num_experts_per_tok=3, moe_intermediate_size=20, norm_topk_prob=not mixed,
                mlp_only_layers=[1] if mixed else [],
                rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
            )
        )  # fmt: skip
    else:
        rope = {
            "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        }  # fmt: skip
        config = {**_COMMON, "num_key_value_heads": 4, "rms_norm_eps": 1e-5}
        model = LlamaForCausalLM(
            LlamaConfig(**config, num_hidden_layers=3, tie_word_embeddings=True, rope_parameters=rope)
        )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight") or name.endswith(".bias"):
                parameter.add_(torch.randn_like(parameter) * 0.3)  # initial ones and zeros would hide a swap
            if name.endswith("mlp.gate.weight"):
                parameter.normal_(std=0.5)
    return model.eval()


def save_tiny_model(kind: str, directory: Path, dtype: torch.dtype = torch.float32, shard: str = "20KB") -> Path:
    """Save the model in several safetensors files, with stand-ins for tokenizer files."""
    tiny_model(kind).to(dtype).save_pretrained(directory, max_shard_size=shard)
    (directory / "tokenizer.json").write_text('{"version": "1.0"}')
    (directory / "tokenizer_config.json").write_text('{"model_max_length": 256}')
    return directory
