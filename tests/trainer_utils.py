"""A tiny trainer configuration, samples for it, and its gradients, for tests."""

from __future__ import annotations

import random
from array import array
from typing import Any

import pytest
import torch

from slime_retool.config import Config
from slime_retool.rollout.replay import dump_batch
from slime_retool.types import RolloutBatch, RoutedExperts, TrainSample

VOCAB_SIZE = 67
"""Padded to 80 at TP1 and to 96 at TP2."""


def tiny_config(**overrides: Any) -> Config:
    """Two Qwen3 layers of width 32, fp32, six samples per rollout."""
    values: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 32,
        "ffn_hidden_size": 48,
        "num_attention_heads": 4,
        "group_query_attention": True,
        "num_query_groups": 2,
        "kv_channels": 8,
        "vocab_size": VOCAB_SIZE,
        "make_vocab_size_divisible_by": 16,
        "max_position_embeddings": 64,
        "swiglu": True,
        "disable_bias_linear": True,
        "qk_layernorm": True,
        "normalization": "RMSNorm",
        "norm_epsilon": 1e-6,
        "use_rotary_position_embeddings": True,
        "device": "cpu",
        "rollout_batch_size": 6,
        "lr": 1e-2,
        "clip_grad": 0.0,
        "use_dynamic_batch_size": True,
        "max_tokens_per_gpu": 24,
    }
    return Config(**{**values, **overrides})


def random_samples(count: int = 6, *, seed: int = 0, engine: bool = True) -> list[TrainSample]:
    """Samples of 3 to 20 tokens in groups of 3, about half of them learned; one of them has no learned token."""
    rng = random.Random(seed)
    samples = []
    for index in range(count):
        length = rng.randint(3, 20)
        mask = [0] + [int(index != 1 and rng.random() < 0.6) for _ in range(length - 1)]
        samples.append(
            TrainSample(
                tokens=[rng.randrange(VOCAB_SIZE) for _ in range(length)],
                loss_mask=mask,
                rollout_log_probs=[-rng.uniform(2, 6) * m for m in mask] if engine else None,
                reward=rng.uniform(-1.5, 1.5),
                index=index,
                group_index=index // 3,
            )
        )
    return samples


def keep_batch(output_dir: str, rollout_id: int, batch: RolloutBatch, *, compressed: bool = False) -> None:
    """What a run with --dump-rollouts keeps of a batch for --replay-rollouts."""
    config = Config(output_dir=output_dir, dump_rollouts_compressed=compressed)
    dump_batch(config.dump_path("trained_on", rollout_id), rollout_id, batch)


def sharpen(trainer: Any) -> None:
    """Scale the matrices, so that the model is far from uniform and layouts could differ visibly."""
    with torch.no_grad():
        for parameter in trainer.module.parameters():
            parameter.mul_(6.0) if parameter.dim() > 1 else parameter.add_(0.3 * parameter.sin())
        for name, buffer in trainer.module.named_buffers():
            if name.endswith("expert_bias"):
                buffer.copy_(torch.linspace(-0.5, 0.5, len(buffer)))
    trainer.actor.optimizer.reload_model_params()


def gradients(trainer: Any) -> dict[str, torch.Tensor]:
    """Whole gradients of the last optimizer step by HF name, on global rank 0."""
    return _gradients(trainer.actor)


def _gradients(role: Any) -> dict[str, torch.Tensor]:
    """The gradients stand in the weights' places while they are gathered."""
    from slime_retool.trainer.gather import hf_named_tensors

    kept = [(parameter, parameter.data) for parameter in role.module.parameters()]
    try:
        for parameter, _ in kept:
            parameter.data = parameter.main_grad
        return {name: tensor.clone() for name, tensor in hf_named_tensors(role.module, role.config)}
    finally:
        for parameter, data in kept:
            parameter.data = data


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    """Whole weights by HF name, on global rank 0."""
    from slime_retool.trainer.gather import hf_named_tensors

    return {name: tensor.clone() for name, tensor in hf_named_tensors(trainer.module, trainer.config)}


def critic_gradients(trainer: Any) -> dict[str, torch.Tensor]:
    """As `gradients`, of the critic; its value head [1, H] is called "head"."""
    out = _gradients(trainer.critic)
    if "lm_head.weight" in out:
        # The head stands where the output layer was, and every tensor-parallel rank holds all of it.
        rows = out.pop("lm_head.weight")
        assert torch.equal(rows, rows[:1].expand_as(rows))
        out["head"] = rows[:1]
    return out


def make_trainer(rank: int, world_size: int, config: Config, roles: str = "all") -> Any:
    from slime_retool.trainer.core import Trainer

    return Trainer(
        config, rank=rank, world_size=world_size, local_rank=rank, init_method="tcp://127.0.0.1:0", roles=roles
    )


def hf_moe_model(config: Config, checkpoint: str) -> Any:
    """The policy saved in `checkpoint` in transformers, float64, one expert's tensor after the other."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from megatron_bridge.checkpoint import resolve_checkpoint_dir
    from megatron_bridge.layout import to_hf
    from megatron_bridge.model_config import moe_layers
    from megatron_bridge.names import megatron_names
    from megatron_bridge.torch_dist_io import TorchDistReader

    c, with_experts = config, moe_layers(config)
    reader = TorchDistReader(resolve_checkpoint_dir(checkpoint))
    hf = {key: value for name in megatron_names(c) for key, value in to_hf(name, reader.read(name), c)}
    for layer in (layer for layer, experts in enumerate(with_experts) if experts):
        experts = f"model.layers.{layer}.mlp.experts"
        parts = {
            part: [hf.pop(f"{experts}.{e}.{part}_proj.weight") for e in range(c.num_experts or 0)]
            for part in ("gate", "up", "down")
        }
        pairs = zip(parts["gate"], parts["up"], strict=True)
        hf[f"{experts}.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in pairs])
        hf[f"{experts}.down_proj"] = torch.stack(parts["down"])
    model = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=VOCAB_SIZE, hidden_size=c.hidden_size, intermediate_size=c.ffn_hidden_size,
            num_hidden_layers=c.num_layers, num_attention_heads=c.num_attention_heads,
            num_key_value_heads=c.num_query_groups, head_dim=c.kv_channels, rms_norm_eps=c.norm_epsilon,
            num_experts=c.num_experts, num_experts_per_tok=c.moe_router_topk,
            moe_intermediate_size=c.moe_ffn_hidden_size, norm_topk_prob=not c.moe_router_pre_softmax,
            mlp_only_layers=[layer for layer, experts in enumerate(with_experts) if not experts],
            tie_word_embeddings=False, rope_parameters={"rope_type": "default", "rope_theta": float(c.rotary_base)},
        )
    )  # fmt: skip
    missing, unexpected = model.load_state_dict(hf, strict=False)
    assert not unexpected and not missing
    model.set_experts_implementation("eager")  # the other ones have no float64
    return model.double()


def random_routed_experts(config: Config, tokens: int, seed: int, *, unrouted: float = 0.2) -> RoutedExperts:
    """Experts of a random router: of `tokens` tokens, this share of which is unrouted."""
    from megatron_bridge.model_config import moe_layers, required

    rng = random.Random(seed)
    layers, top_k, experts = (
        sum(moe_layers(config)),
        required(config, "moe_router_topk"),
        required(config, "num_experts"),
    )
    out = RoutedExperts.unrouted(tokens, layers, top_k, RoutedExperts.typecode(experts))
    for token in range(tokens):
        if rng.random() >= unrouted:
            chosen = [expert for _ in range(layers) for expert in rng.sample(range(experts), top_k)]
            out.put(token, RoutedExperts(array(out.ids.typecode, chosen), layers, top_k))
    return out


def assert_same_step(got: dict[str, Any], want: dict[str, Any]) -> None:
    """One step of adapters from the same `start` made the same `log_probs`, `grads`, `weights` and `metrics`."""
    assert all(torch.equal(got["start"][key], value) for key, value in want["start"].items())
    assert torch.allclose(got["log_probs"], want["log_probs"], atol=1e-5)
    for kind in ("grads", "weights"):
        assert set(got[kind]) == set(want[kind])
        for key, value in want[kind].items():
            assert torch.allclose(got[kind][key], value, atol=1e-5, rtol=1e-4), (kind, key)
    for metric in ("loss", "kl_loss", "grad_norm"):
        assert got["metrics"][f"train/{metric}"] == pytest.approx(want["metrics"][f"train/{metric}"], rel=1e-4)
