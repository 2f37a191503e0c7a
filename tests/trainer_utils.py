"""A tiny trainer configuration, samples for it, and its gradients, for tests."""

from __future__ import annotations

import random
from typing import Any

import torch

from slime_retool.config import Config
from slime_retool.types import TrainSample

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
