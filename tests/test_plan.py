"""`slime-retool plan`: counts against published models, memory and time against measured runs, the command itself."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from test_model_scripts import PUBLISHED, source

from slime_retool.cli import main
from slime_retool.config import Config
from slime_retool.planning.cards import CARDS
from slime_retool.planning.memory import GIB, trainer_memory
from slime_retool.planning.parameters import stage_layers, stage_parameters, total_parameters
from slime_retool.planning.report import changes_that_fit, make_plan
from slime_retool.planning.timing import step_time

ROOT = Path(__file__).resolve().parents[1]


def flags_of(name: str) -> list[str]:
    text = f'source "{ROOT}/scripts/models/{name}.sh"; printf "%s\\n" "${{MODEL_ARGS[@]}}"'
    return subprocess.run(["bash", "-c", text], check=True, capture_output=True, text=True).stdout.split()


def config_of(name: str, **fields: object) -> Config:
    model = source(name, ROOT)
    config = Config(**{**model.__dict__, "rollout_batch_size": 32, "n_samples_per_prompt": 8, "device": "cuda"})
    for field, value in fields.items():
        setattr(config, field, value)
    return config


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_the_published_count(name):
    assert total_parameters(source(name, ROOT)) == PUBLISHED[name][1]


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (8, 1), (4, 4), (8, 8)])
def test_the_ranks_of_a_layout_hold_the_whole_model(tp, pp):
    model = source("qwen2.5-32B", ROOT)
    layers = stage_layers(64, pp)
    held = tp * sum(stage_parameters(model, stage=s, layers=layers[s], tp=tp, pp=pp) for s in range(pp))
    copies = tp - 1  # norms are on every tensor-parallel rank
    norms = (64 * 2 + 1) * 5120
    padding = 2 * 5120 * (stage_parameters(model, stage=0, layers=0, tp=tp, pp=2) * tp // 5120 - 152064)
    assert held == total_parameters(model) + copies * norms + padding


@pytest.mark.parametrize(("ep", "etp"), [(1, 1), (8, 1), (8, 2)])
def test_experts_are_spread_over_their_ranks(ep, etp):
    """Of 30B-A3B, 48 layers of 128 experts of 3 * 2048 * 768 are divided, 1,541,093,376 parameters are not."""
    model = source("qwen3-30B-A3B", ROOT)
    held = stage_parameters(model, stage=0, layers=48, tp=1, pp=1, ep=ep, etp=etp)
    assert held == 1_541_093_376 + 48 * 128 * 3 * 2048 * 768 // (ep * etp)


def test_uneven_stages_get_the_layers_that_were_asked_for():
    assert stage_layers(36, 4, first=6, last=8) == [6, 11, 11, 8]
    assert stage_layers(28, 2, last=13) == [15, 13]


def test_full_recomputation_and_more_ranks_need_less_memory():
    dense = config_of("qwen3-4B", use_dynamic_batch_size=True, max_tokens_per_gpu=16384, debug_train_only=True)
    recomputed = config_of(
        "qwen3-4B", use_dynamic_batch_size=True, max_tokens_per_gpu=16384, debug_train_only=True,
        recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1,
    )  # fmt: skip
    assert trainer_memory(recomputed, 2000).activations < trainer_memory(dense, 2000).activations / 10
    two = config_of(
        "qwen3-4B", use_dynamic_batch_size=True, max_tokens_per_gpu=16384, debug_train_only=True,
        actor_num_gpus_per_node=2, tensor_model_parallel_size=2, sequence_parallel=True,
    )  # fmt: skip
    assert trainer_memory(two, 2000).total < 0.55 * trainer_memory(dense, 2000).total


@pytest.mark.parametrize("tp", [1, 2])
def test_adapters_are_all_that_has_gradients_and_optimizer_state(tp):
    """PEFT's count for rank 16 on all linear layers of Qwen3-4B is 33,030,144; A of the fused layers is shared here."""
    config = config_of("qwen3-4B", lora_rank=16, actor_num_gpus_per_node=tp, tensor_model_parallel_size=tp)
    ends = {"q": (2560, 4096), "kv": (2560, 2048), "o": (4096, 2560), "gate, up": (2560, 19456), "down": (9728, 2560)}
    in_peft = 16 * (sum(a + b for a, b in ends.values()) + 2 * 2560)  # one A each for k and v, gate and up
    assert 36 * in_peft == 33_030_144
    split = 36 * 16 * (4096 + 2048 + 4096 + 19456 + 9728)
    whole = 36 * 16 * 4 * 2560
    memory = trainer_memory(config, 2000)
    assert memory.gradients == 4 * (whole + split // tp)
    assert memory.optimizer == 12 * (whole + split // tp)
    full = trainer_memory(config_of("qwen3-4B"), 2000)
    assert 0 < trainer_memory(config, 2000).weights * tp - full.weights < 0.02 * full.weights


def test_pipeline_stages_keep_one_micro_batch_for_each_stage_behind_them():
    config = config_of(
        "qwen3-8B", actor_num_gpus_per_node=4, pipeline_model_parallel_size=4, debug_train_only=True,
        use_dynamic_batch_size=True, max_tokens_per_gpu=4096,
    )  # fmt: skip
    single = config_of("qwen3-8B", debug_train_only=True, use_dynamic_batch_size=True, max_tokens_per_gpu=4096)
    assert trainer_memory(config, 1000).activations == pytest.approx(trainer_memory(single, 1000).activations, rel=0.01)


def test_a_plan_that_does_not_fit_names_changes_that_do():
    config = config_of(
        "qwen2.5-32B", actor_num_gpus_per_node=8, tensor_model_parallel_size=8, sequence_parallel=True,
        use_dynamic_batch_size=True, max_tokens_per_gpu=16384, debug_train_only=True,
    )  # fmt: skip
    lengths = {"mean_prompt": 200, "mean_response": 4000}
    assert not make_plan(config, CARDS["h100"], **lengths).fits
    changes = changes_that_fit(config, CARDS["h100"], **lengths)
    assert changes
    assert all(change.resident < CARDS["h100"].memory_bytes for change in changes)


def test_time_grows_with_tokens_and_shrinks_with_gpus():
    config = config_of("qwen3-4B", debug_train_only=True)
    short = step_time(config, CARDS["h200"], mean_prompt=100, mean_response=1000)
    long = step_time(config, CARDS["h200"], mean_prompt=100, mean_response=4000)
    assert 3 * short.train < long.train < 6 * short.train
    four = config_of("qwen3-4B", debug_train_only=True, actor_num_gpus_per_node=4)
    assert step_time(four, CARDS["h200"], mean_prompt=100, mean_response=4000).train < long.train / 3


def test_the_command_prints_a_page_or_json_and_tells_by_its_exit_code(capsys):
    flags = [*flags_of("qwen3-4B"), "--rollout-batch-size", "32", "--n-samples-per-prompt", "8", "--debug-train-only"]
    assert main(["plan", "--card", "h200", *flags]) == 0
    assert "fits" in capsys.readouterr().out
    assert main(["plan", "--card", "a100", "--json", *flags, "--micro-batch-size", "64"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["fits"] is False and report["resident"] > 80 * GIB and report["changes"]


def test_a_layout_that_cannot_be_built_is_refused_in_one_line(capsys):
    flags = [*flags_of("qwen3-4B"), "--rollout-batch-size", "32", "--tensor-model-parallel-size", "3"]
    assert main(["plan", *flags]) == 2
    error = capsys.readouterr().err
    assert error.startswith("slime-retool plan: error: --tensor-model-parallel-size 3") and error.count("\n") == 1
