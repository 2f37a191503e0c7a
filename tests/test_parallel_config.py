"""Parallel sizes are refused in one line that names the nearest sizes that fit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from trainer_utils import tiny_config

from slime_retool.config.parallel import check_parallel, check_world_size
from slime_retool.errors import ConfigError

EXPERTS: dict[str, Any] = {"num_experts": 12, "moe_router_topk": 2, "moe_ffn_hidden_size": 24}
REFUSED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "context-parallel size beyond the GPUs": (
        {"actor_num_gpus_per_node": 4, "context_parallel_size": 8},
        ["--context-parallel-size 8 is more than the 4 training processes (1 nodes x 4); use at most 4"],
    ),
    "sequence-parallel size beyond the GPUs": (
        {"actor_num_gpus_per_node": 4, "tensor_model_parallel_size": 8, "sequence_parallel": True},
        ["--tensor-model-parallel-size 8 is more than the 4", "use at most 4"],
    ),
    "a product beyond the GPUs": (
        {"actor_num_gpus_per_node": 4, "tensor_model_parallel_size": 2, "context_parallel_size": 4},
        ["2 x 1 x 4 = 8 does not divide the 4", "that does is --context-parallel-size 2"],
    ),
    "a product that leaves a rest": (
        {"actor_num_gpus_per_node": 6, "tensor_model_parallel_size": 2, "context_parallel_size": 2},
        ["2 x 1 x 2 = 4 does not divide the 6", "is --context-parallel-size 3"],
    ),
    "key/value heads": (
        {"actor_num_gpus_per_node": 4, "tensor_model_parallel_size": 4},
        ["--tensor-model-parallel-size 4 must divide the model's key/value heads (2); use 2"],
    ),
    "layers": (
        {"actor_num_gpus_per_node": 4, "pipeline_model_parallel_size": 4},
        ["--pipeline-model-parallel-size 4 is more than the model's 2 layers: use at most 2"],
    ),
    "experts": (
        {**EXPERTS, "actor_num_gpus_per_node": 8, "expert_model_parallel_size": 8},
        ["--expert-model-parallel-size 8 must divide the model's 12 experts; use 6"],
    ),
    "width of an expert": (
        {**EXPERTS, "actor_num_gpus_per_node": 16, "expert_tensor_parallel_size": 16},
        ["--expert-tensor-parallel-size 16 must divide the experts' inner width (24); use 12"],
    ),
    "experts x tensor": (
        {**EXPERTS, "actor_num_gpus_per_node": 8, "expert_model_parallel_size": 6, "expert_tensor_parallel_size": 2},
        ["2 x 6 x 1 = 12 does not divide the 8", "is --expert-model-parallel-size 4"],
    ),
    "expert parallel without experts": (
        {"actor_num_gpus_per_node": 2, "expert_model_parallel_size": 2},
        ["--expert-model-parallel-size 2: the model has no experts; use 1"],
    ),
    "experts without sequence parallel": (
        {**EXPERTS, "actor_num_gpus_per_node": 2, "tensor_model_parallel_size": 2},
        ["--tensor-model-parallel-size 2 with experts needs --sequence-parallel"],
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_sizes_that_do_not_fit_are_refused_in_one_line(case: str) -> None:
    options, parts = REFUSED[case]
    with pytest.raises(ConfigError) as refusal:
        check_parallel(tiny_config(**options))
    message = str(refusal.value)
    assert "\n" not in message and all(part in message for part in parts), message


@pytest.mark.parametrize(
    ("gpus", "options"),
    [
        (8, {"tensor_model_parallel_size": 2, "context_parallel_size": 4}),
        (4, {**EXPERTS, "expert_model_parallel_size": 4}),
        (4, {**EXPERTS, "expert_model_parallel_size": 2, "tensor_model_parallel_size": 2, "sequence_parallel": True}),
        (8, {**EXPERTS, "expert_model_parallel_size": 4, "pipeline_model_parallel_size": 2}),
    ],
)
def test_sizes_that_fit_are_accepted(gpus: int, options: dict[str, Any]) -> None:
    check_parallel(tiny_config(actor_num_gpus_per_node=gpus, **options))


def test_every_layout_named_by_a_refusal_is_accepted() -> None:
    """Whatever the sizes, following the advice leads to a layout of the dense part that fits."""
    for world in (1, 2, 3, 4, 6, 8, 12, 16):
        for tp in (1, 2, 4, 8):
            for pp in (1, 2):
                for cp in (1, 2, 3, 4):
                    sizes = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp}
                    config = tiny_config(**sizes, context_parallel_size=cp)
                    for _ in range(3):  # one size beyond the world is refused at a time
                        try:
                            check_world_size(config, world)
                            break
                        except ConfigError as refusal:
                            config = replace(config, **_advice(str(refusal)))
                    check_world_size(config, world)


def _advice(message: str) -> dict[str, int]:
    if "use at most" in message:
        flag, _, rest = message.partition(" ")
        return {_field(flag): int(rest.rsplit(" ", 1)[1])}
    words = message.split("that does is ")[1].split()
    return {_field(flag): int(value) for flag, value in zip(words[::2], words[1::2], strict=True)}


def _field(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")
