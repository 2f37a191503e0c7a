"""A family beyond Qwen3 from end to end: its checkpoint in a real SGLang engine and in a trainer of two processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from bridge_models import save_tiny_model
from dist_utils import run_distributed
from sglang_utils import engine_config, tiny_tokenizer
from test_trainer_weight_sync import PROMPT, TIMEOUT_MINUTES, _generate
from trainer_utils import make_trainer, random_samples, tiny_config, weights

from megatron_bridge.convert import convert_hf_to_torch_dist
from megatron_bridge.hf_config import model_args_from_hf, read_hf_config
from slime_retool.engine.admin import EngineAdmin
from slime_retool.engine.server import EngineProcess, server_environment
from slime_retool.types import RolloutBatch

BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


@pytest.fixture(scope="module")
def rounds(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Of a tiny GLM-4.5 before and after training and a weight update: both sides' log-probs, the trainer's weights."""
    root: Path = tmp_path_factory.mktemp("served")
    tokenizer = tiny_tokenizer()
    source = save_tiny_model(
        # Widths of multiples of 32: an engine on a CPU pads others with zeros, and its checksums would be of those.
        "glm4_moe", root / "hf", intermediate_size=64, vocab_size=len(tokenizer), eos_token_id=256, pad_token_id=257,
        bos_token_id=None,
    )  # fmt: skip
    tokenizer.save_pretrained(source)
    model = model_args_from_hf(read_hf_config(source))
    convert_hf_to_torch_dist(model, source, root / "td", progress=False)
    with EngineProcess(engine_config(source, root / "out")) as engine:
        return run_distributed(_train_and_send, 2, engine.url, str(root))[0]


def _train_and_send(rank: int, world_size: int, url: str, root: str) -> list[dict[str, Any]]:
    from slime_retool.trainer.weight_sync import WeightSync
    from slime_retool.types import TrainSample

    model = model_args_from_hf(read_hf_config(f"{root}/hf"))
    config = tiny_config(
        **vars(model), tensor_model_parallel_size=2, sequence_parallel=True, expert_model_parallel_size=2,
        ref_load=f"{root}/td", hf_checkpoint=f"{root}/hf", output_dir=root, max_tokens_per_gpu=64,
        distributed_timeout_minutes=TIMEOUT_MINUTES,
    )  # fmt: skip
    trainer = make_trainer(rank, world_size, config)
    trainer.load()
    sync = WeightSync(trainer, [url], transport="broadcast")
    probe = TrainSample(PROMPT, [0] + [1] * (len(PROMPT) - 1))
    out = []
    for step in range(2):
        log_probs = trainer.log_probs([probe]).tolist()[1:]
        theirs, _ = _generate(url, PROMPT) if rank == 0 else ([], [])
        expected = sync.weight_checksums()
        held = EngineAdmin(url, timeout=TIMEOUT_MINUTES * 60).weight_checksums() if rank == 0 else {}
        checksums = {"trainer_checksums": expected, "engine_checksums": held}
        out.append({"trainer": log_probs, "engine": theirs, "weights": weights(trainer), **checksums})
        if step == 0:
            trainer.train(RolloutBatch(random_samples()), 0)
            sync.update()
    sync.close()
    trainer.shutdown()
    return out


def test_the_engine_and_the_trainer_compute_alike_before_and_after_an_update(rounds: list[dict[str, Any]]) -> None:
    for each in rounds:
        assert each["engine"] == pytest.approx(each["trainer"], abs=1e-5)
    assert rounds[0]["engine"] != pytest.approx(rounds[1]["engine"], abs=1e-2)


def test_the_engine_holds_the_trainers_weights_before_and_after_an_update(rounds: list[dict[str, Any]]) -> None:
    for each in rounds:
        assert each["engine_checksums"] == each["trainer_checksums"]
    assert rounds[0]["engine_checksums"] != rounds[1]["engine_checksums"]


def test_training_moves_every_weight_but_the_experts_bias(rounds: list[dict[str, Any]]) -> None:
    before, after = (each["weights"] for each in rounds)
    still = {name for name in before if torch.equal(before[name], after[name])}
    assert still == {BIAS, BIAS.replace(".1.", ".2.")}


ROUTER = """
from types import SimpleNamespace
import torch
from sglang.srt.models.glm4_moe import Glm4MoeGate
from slime_retool.engine.weight_copies import COPY, refresh

model = torch.nn.ModuleDict({"gate": Glm4MoeGate(SimpleNamespace(n_routed_experts=4, hidden_size=8))}).bfloat16()
model.gate.weight.data.fill_(1)
x = torch.arange(8.0).bfloat16()[None]
refresh(model, [])  # before a first pass there is no copy
first = model.gate(x)
place = getattr(model.gate, COPY).data_ptr()
model.gate.weight.data.copy_(torch.arange(32).view(4, 8))
refresh(model, [])
assert torch.equal(model.gate(x), x.float() @ model.gate.weight.data.float().T), model.gate(x)
assert not torch.equal(model.gate(x), first)
assert getattr(model.gate, COPY).data_ptr() == place, "a CUDA graph would read the old memory"
"""


def test_an_engines_router_follows_an_update_in_bf16(tmp_path: Path) -> None:
    """SGLang's own module, in a process with an engine's environment: it keeps an fp32 copy of its weight."""
    environment = server_environment(engine_config(tmp_path, tmp_path), None)
    done = subprocess.run(
        [sys.executable, "-c", ROUTER], env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
