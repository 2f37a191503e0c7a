"""The trainer's log-probs of each model family against transformers', at the temperatures of a rollout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from bridge_models import KINDS, save_tiny_model, tiny_model
from dist_utils import run_distributed
from trainer_utils import make_trainer

from megatron_bridge.convert import convert_hf_to_torch_dist
from megatron_bridge.hf_config import model_args_from_hf, read_hf_config
from slime_retool.config import Config
from slime_retool.types import TrainSample

TEMPERATURES = (1.0, 0.7)


def _samples() -> list[TrainSample]:
    generator = torch.Generator().manual_seed(0)
    lengths = (2, 17, 40, 5)
    return [
        TrainSample(torch.randint(101, (n,), generator=generator).tolist(), [0] + [1] * (n - 1), index=i)
        for i, n in enumerate(lengths)
    ]


def _trainer_log_probs(rank: int, world_size: int, root: str) -> dict[tuple[str, float], torch.Tensor]:
    out = {}
    for kind in KINDS:
        model = model_args_from_hf(read_hf_config(f"{root}/{kind}"))
        for temperature in TEMPERATURES:
            config = Config(
                **vars(model), device="cpu", ref_load=f"{root}/{kind}_torch_dist", rollout_batch_size=4,
                rollout_temperature=temperature, use_dynamic_batch_size=True, max_tokens_per_gpu=48,
            )  # fmt: skip
            trainer = make_trainer(rank, world_size, config)
            trainer.load()
            out[kind, temperature] = trainer.log_probs(_samples())
            trainer.shutdown()
    return out


@pytest.fixture(scope="module")
def trainer_log_probs(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, float], Any]:
    root = tmp_path_factory.mktemp("families")
    for kind in KINDS:
        folder: Path = root / kind
        folder.mkdir()
        save_tiny_model(kind, folder)
        model = model_args_from_hf(read_hf_config(folder))
        convert_hf_to_torch_dist(model, folder, root / f"{kind}_torch_dist", progress=False)
    return run_distributed(_trainer_log_probs, 1, str(root))[0]


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("kind", KINDS)
def test_log_probs_equal_transformers(
    trainer_log_probs: dict[tuple[str, float], Any], kind: str, temperature: float
) -> None:
    model = tiny_model(kind)
    if model_args_from_hf(model.config.to_dict()).num_experts is not None:
        model.set_experts_implementation("eager")  # the other ones have no float64
    model = model.double()
    expected = []
    for sample in _samples():
        tokens = torch.tensor([list(sample.tokens)])
        with torch.no_grad():
            log_p = torch.log_softmax(model(tokens).logits[0, :-1] / temperature, -1)
        expected += [0.0, *log_p.gather(1, tokens[0, 1:, None])[:, 0].tolist()]
    assert trainer_log_probs[kind, temperature].tolist() == pytest.approx(expected, abs=2e-5)
