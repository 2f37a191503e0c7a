"""The model's operation count against torch's own counter on Hugging Face models, and what a step reports of it."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, Glm4MoeConfig, Qwen2MoeConfig, Qwen3Config, Qwen3MoeConfig

from megatron_bridge.arithmetic.cards import CARDS, card_of_device
from megatron_bridge.arithmetic.flops import model_flops
from megatron_bridge.hf_config import model_args_from_hf
from megatron_bridge.lora_spec import LoraSpec
from megatron_bridge.model_config import ModelArgs, head_dim
from slime_retool.config import Config
from slime_retool.trainer.batch import TrainBatch
from slime_retool.trainer.report import speed_metrics
from slime_retool.types import TrainSample

SIZES = {"hidden_size": 64, "num_attention_heads": 4, "vocab_size": 96}
DENSE = ModelArgs(
    num_layers=3, ffn_hidden_size=112, group_query_attention=True, num_query_groups=2, kv_channels=24, swiglu=True,
    qk_layernorm=True, **SIZES,
)  # fmt: skip
MOE = ModelArgs(
    num_layers=3, ffn_hidden_size=112, group_query_attention=True, num_query_groups=2, kv_channels=24, swiglu=True,
    qk_layernorm=True, num_experts=8, moe_router_topk=2, moe_ffn_hidden_size=40, moe_layer_freq="[0,1,1]", **SIZES,
)  # fmt: skip
HF = {"num_hidden_layers": 3, "intermediate_size": 112, "num_key_value_heads": 2, "head_dim": 24, **SIZES}
HF_CONFIGS = {
    "dense": Qwen3Config(**HF),
    "moe": Qwen3MoeConfig(
        **HF, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=40, mlp_only_layers=[0],
        experts_implementation="eager",
    ),
}  # fmt: skip
MODELS = {"dense": DENSE, "moe": MOE}
for _kind, _config in {
    "a shared expert": Glm4MoeConfig(
        **HF, n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=40, n_shared_experts=2,
        attention_bias=True, experts_implementation="eager",
    ),
    "a shared expert with a gate": Qwen2MoeConfig(
        **{**HF, "head_dim": 16}, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=40,
        shared_expert_intermediate_size=56, experts_implementation="eager",
    ),
}.items():  # fmt: skip
    HF_CONFIGS[_kind], MODELS[_kind] = _config, model_args_from_hf(_config.to_dict())
LENGTH = 37


def counted(kind: str, *, backward: bool, frozen: bool = False) -> float:
    """What torch executes for one sequence with whole attention matrices, less the half that a causal mask leaves."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(HF_CONFIGS[kind], attn_implementation="eager").float()
    inputs = model.get_input_embeddings()(torch.arange(LENGTH)[None]).detach().requires_grad_()
    if frozen:
        model.requires_grad_(False)
    with FlopCounterMode(display=False) as counter:
        logits = model(inputs_embeds=inputs, use_cache=False).logits
        if backward:
            logits.sum().backward()
    width = head_dim(MODELS[kind])
    masked = 2 * 3 * (4 * width) * LENGTH**2 * (3 if backward else 1)
    # the angles: an outer product of the frequencies and the positions, by matmul
    rotary = 2 * round(MODELS[kind].rotary_percent * width / 2) * LENGTH
    return counter.get_total_flops() - masked - rotary


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("training", [False, True])
def test_a_models_operations_are_those_that_torch_counts(kind, training):
    assert model_flops(MODELS[kind], [LENGTH], training=training) == counted(kind, backward=training)


def test_frozen_matrices_have_no_gradient_of_their_own():
    no_adapters = LoraSpec(rank=4, alpha=8, targets=())
    assert model_flops(DENSE, [LENGTH], training=True, lora=no_adapters) == counted("dense", backward=True, frozen=True)


def test_adapters_are_small_matrices_that_learn():
    spec = {"rank": 4, "alpha": 8}
    without = model_flops(DENSE, [LENGTH], training=True, lora=LoraSpec(**spec, targets=()))
    with_some = model_flops(DENSE, [LENGTH], training=True, lora=LoraSpec(**spec, targets=("linear_qkv", "linear_fc2")))
    # A: 64 -> 4, B: 4 -> 4 * 24 + 2 * 48; A: 112 -> 4, B: 4 -> 64; three layers, forward and both gradients.
    assert with_some - without == 6 * LENGTH * 3 * 4 * (64 + 192 + 112 + 64)


def test_sequences_add_up_and_unread_logits_are_not_made():
    both = model_flops(DENSE, [LENGTH, 5], training=True)
    assert both == model_flops(DENSE, [LENGTH], training=True) + model_flops(DENSE, [5], training=True)
    assert both - model_flops(DENSE, [LENGTH, 5], training=True, logit_tokens=30) == 6 * (LENGTH + 5 - 30) * 96 * 64


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("NVIDIA H200", "h200"), ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA B200", "b200"), ("NVIDIA H100 PCIe", None), ("NVIDIA H200 NVL", None), ("NVIDIA GH200 480GB", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None), ("NVIDIA L40S", None),
    ],
)  # fmt: skip
def test_a_card_is_known_by_its_cuda_name(name, key):
    assert card_of_device(name) is (None if key is None else CARDS[key])


def test_mfu_is_the_models_operations_over_what_the_cards_could_make(monkeypatch):
    """Two H200 and two sequences: 3 * (2 * (layers * tokens + output * learned) + 2 * L * q * sum of squares)."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    config = Config(**vars(DENSE), actor_num_gpus_per_node=2)
    samples = [TrainSample([1] * n, [0] * (n - 3) + [1] * 3) for n in (10, 6)]
    figures = speed_metrics(config, TrainBatch.from_samples(samples), 0.5, torch.device("cuda"))
    layer = 64 * (2 * 96 + 2 * 48) + 3 * 64 * 112
    work = 3 * (2 * (3 * layer * 16 + 96 * 64 * 6) + 2 * 3 * 96 * (100 + 36))
    assert figures["perf/train_mfu"] == pytest.approx(work / (0.5 * 2 * 989e12))
    assert figures["perf/train_tokens_per_second_per_gpu"] == 16 / 0.5 / 2
    assert "perf/train_mfu" not in speed_metrics(config, TrainBatch.from_samples(samples), 0.5, torch.device("cpu"))
