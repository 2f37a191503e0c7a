"""Tiny random Hugging Face models that the bridge tests convert, their logits, and Megatron's models of them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import (
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from megatron_bridge.checkpoint import load_model_state, model_state_dict, resolve_checkpoint_dir
from megatron_bridge.convert import convert_hf_to_torch_dist, convert_torch_dist_to_hf
from megatron_bridge.cpu_compat import install_cpu_compat
from megatron_bridge.hf_config import model_args_from_hf, read_hf_config

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

KINDS = ("qwen2", "qwen3", "llama", "qwen3_moe", "qwen3_mixed", "glm4_moe", "glm4_air", "qwen2_moe", "mixtral")
DENSE_KINDS = KINDS[:3]
LENGTHS = [7, 1, 12, 4]
"""Of the sequences that are scored."""


def tiny_model(kind: str, **overrides: Any) -> torch.nn.Module:
    """Three layers. qwen2: biases, tied. qwen3: head norms, wide heads, untied. llama: scaled rotary, tied, MHA.

    qwen3_moe: 6 experts, 3 per token, weights of the chosen normalised. qwen3_mixed: experts in layers 0 and 2 only,
    not normalised, tied. glm4_moe: first layer dense, half of each head rotated, a shared expert, head norms; glm4_air:
    without those. qwen2_moe: a shared expert with a gate, experts in layers 0 and 2 only.
    mixtral: experts that have the MLP's width. `overrides` are values of config.json that all of them have.
    """
    common = _COMMON | overrides
    torch.manual_seed(KINDS.index(kind))
    rope_of_experts = {"rope_type": "default", "rope_theta": 1000000.0}
    if kind == "qwen2":
        model = Qwen2ForCausalLM(
            Qwen2Config(
                **common, num_hidden_layers=3, tie_word_embeddings=True,
                rope_parameters={"rope_type": "default", "rope_theta": 20000.0},
            )
        )  # fmt: skip
    elif kind == "qwen3":
        model = Qwen3ForCausalLM(
            Qwen3Config(
                **common, num_hidden_layers=3, head_dim=16, tie_word_embeddings=False,
                rope_parameters={"rope_type": "default", "rope_theta": 5000000.0},
            )
        )  # fmt: skip
    elif kind.startswith("qwen3_m"):
        mixed = kind == "qwen3_mixed"
        model = Qwen3MoeForCausalLM(
            Qwen3MoeConfig(
                **common, num_hidden_layers=3, head_dim=16, tie_word_embeddings=mixed, num_experts=6,
                num_experts_per_tok=3, moe_intermediate_size=20, norm_topk_prob=not mixed,
                mlp_only_layers=[1] if mixed else [],
                rope_parameters=rope_of_experts,
            )
        )  # fmt: skip
    elif kind.startswith("glm4"):
        air = kind == "glm4_air"
        model = Glm4MoeForCausalLM(
            Glm4MoeConfig(
                **common, num_hidden_layers=3, head_dim=16, n_routed_experts=6,
                num_experts_per_tok=3, moe_intermediate_size=32, n_shared_experts=1 if air else 2,
                first_k_dense_replace=1, routed_scaling_factor=1.0 if air else 2.5, use_qk_norm=not air,
                attention_bias=True, rope_parameters={**rope_of_experts, "partial_rotary_factor": 0.5},
            )
        )  # fmt: skip
    elif kind == "mixtral":
        model = MixtralForCausalLM(
            MixtralConfig(
                **common, num_hidden_layers=3, num_local_experts=6, num_experts_per_tok=3, sliding_window=None,
                rope_parameters=rope_of_experts,
            )
        )  # fmt: skip
    elif kind == "qwen2_moe":
        model = Qwen2MoeForCausalLM(
            Qwen2MoeConfig(
                **common, num_hidden_layers=3, num_experts=6, num_experts_per_tok=3, moe_intermediate_size=20,
                shared_expert_intermediate_size=28, mlp_only_layers=[1], rope_parameters=rope_of_experts,
            )
        )  # fmt: skip
    else:
        rope = {
            "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        }  # fmt: skip
        config = {**common, "num_key_value_heads": 4, "rms_norm_eps": 1e-5}
        model = LlamaForCausalLM(
            LlamaConfig(**config, num_hidden_layers=3, tie_word_embeddings=True, rope_parameters=rope)
        )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight") or name.endswith(".bias"):
                parameter.add_(torch.randn_like(parameter) * 0.3)  # initial ones and zeros would hide a swap
            if name.endswith("mlp.gate.weight"):
                parameter.normal_(std=0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(std=0.3)  # large enough that it chooses, and weighing by it would show
    return model.eval()


def save_tiny_model(
    kind: str, directory: Path, dtype: torch.dtype = torch.float32, shard: str = "20KB", **overrides: Any
) -> Path:
    """Save the model in several safetensors files, with stand-ins for tokenizer files."""
    tiny_model(kind, **overrides).to(dtype).save_pretrained(directory, max_shard_size=shard)
    (directory / "tokenizer.json").write_text('{"version": "1.0"}')
    (directory / "tokenizer_config.json").write_text('{"model_max_length": 256}')
    return directory


def sequences() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(0, 101, (length,), generator=generator) for length in LENGTHS]


def write_references(root: Path, kinds: Iterable[str]) -> Path:
    """For every kind: {kind}/hf and {kind}/td, fp32, and the logits of transformers for each sequence alone."""
    for kind in kinds:
        source = save_tiny_model(kind, root / kind / "hf")
        model = model_args_from_hf(read_hf_config(source))
        convert_hf_to_torch_dist(model, source, root / kind / "td", progress=False)
        reference = tiny_model(kind)
        with torch.no_grad():
            logits = [reference(tokens[None]).logits[0] for tokens in sequences()]
        torch.save(torch.cat(logits), root / kind / "logits.pt")
    return root


def hf_weights(directory: Path) -> dict[str, torch.Tensor]:
    return {name: value for path in directory.glob("*.safetensors") for name, value in load_file(path).items()}


def assert_converts_back(checkpoint: Path, source: Path) -> None:
    """A torch_dist checkpoint holds the weights of `source` (Hugging Face), bit for bit."""
    out = checkpoint.with_name(checkpoint.name + "-hf")
    convert_torch_dist_to_hf(checkpoint, out, source, progress=False)
    back, original = hf_weights(out), hf_weights(source)
    assert back.keys() == original.keys()
    assert all(torch.equal(back[name], original[name]) for name in original), checkpoint


def init_parallel(tp: int = 1, pp: int = 1, cp: int = 1, ep: int = 1, etp: int = 1) -> None:
    """Initialise Megatron's parallel groups and random states over the running torch.distributed group."""
    install_cpu_compat()
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        context_parallel_size=cp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1234)


def save_model(gpt: Any, directory: Path) -> None:
    """Save only the weights into `directory` (created). Collective."""
    from megatron.core import dist_checkpointing

    directory.mkdir(parents=True, exist_ok=True)
    torch.distributed.barrier()
    dist_checkpointing.save(model_state_dict(gpt), str(directory))


def load_model(gpt: Any, path: Path) -> None:
    """Load only the weights, from a checkpoint of any layout. Collective."""
    from megatron.core import dist_checkpointing

    load_model_state(gpt, dist_checkpointing.load(model_state_dict(gpt), str(resolve_checkpoint_dir(path))))


def build_model(
    directory: Path, *, tp=1, pp=1, cp=1, ep=1, etp=1, sequence_parallel=False, first=None, last=None
) -> tuple[Any, Any]:
    """(this rank's GPTModel with random weights, model flags) for {directory}/hf, after making the parallel groups.

    `first` and `last` are the layers of the outer pipeline stages. The caller destroys the groups.
    """
    from megatron.core import parallel_state

    from megatron_bridge.model import build_gpt_model
    from megatron_bridge.transformer_config import transformer_config

    init_parallel(tp, pp, cp, ep, etp)
    model = model_args_from_hf(read_hf_config(directory / "hf"))
    config = transformer_config(
        model, tp=tp, pp=pp, cp=cp, ep=ep, etp=etp, sequence_parallel=sequence_parallel,
        decoder_first_pipeline_num_layers=first, decoder_last_pipeline_num_layers=last,
    )  # fmt: skip
    gpt = build_gpt_model(
        model, config, pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )  # fmt: skip
    return gpt.eval(), model
