"""`slime-retool plan`: counts against published models, memory and time against measured runs, the command itself."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from test_model_scripts import PUBLISHED, source

from megatron_bridge.arithmetic import GIB
from megatron_bridge.arithmetic.cards import CARDS, GEMM_SHARE, SYNC_SECONDS
from megatron_bridge.arithmetic.parameters import (
    active_parameters,
    adapter_parameters,
    stage_layers,
    stage_parameters,
    total_parameters,
)
from slime_retool.cli import main
from slime_retool.commands.plan.changes import changes_that_fit, changes_that_speed_up
from slime_retool.commands.plan.generation import generate_seconds, sync_seconds
from slime_retool.commands.plan.memory import (
    TrainerMemory,
    engine_memory,
    host_memory,
    stage_memory,
    trainer_memories,
)
from slime_retool.commands.plan.plan import Plan, make_plan, memory_of_moments
from slime_retool.commands.plan.timing import stage_passes, train_seconds
from slime_retool.commands.plan.workload import Workload
from slime_retool.config import Config

ROOT = Path(__file__).resolve().parents[1]


def trainer_memory(config: Config, workload: Workload) -> TrainerMemory:
    """Of the fullest rank of the first model's processes."""
    return trainer_memories(config, workload)[0]


def flags_of(name: str) -> list[str]:
    text = f'source "{ROOT}/scripts/models/{name}.sh"; printf "%s\\n" "${{MODEL_ARGS[@]}}"'
    return subprocess.run(["bash", "-c", text], check=True, capture_output=True, text=True).stdout.split()


def config_of(name: str, **fields: object) -> Config:
    model = source(name, ROOT)
    return Config(**{**model.__dict__, "rollout_batch_size": 32, "n_samples_per_prompt": 8, "device": "cuda", **fields})


def plan_of(config: Config, card: str, mean_prompt: float, mean_response: float) -> Plan:
    return make_plan(config, CARDS[card], Workload.of_run(config, mean_prompt, mean_response))


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


def test_a_checkpoint_takes_its_weights_and_optimizer_on_disk():
    config = config_of("qwen3-1.7B")
    assert config.checkpoint_bytes() == pytest.approx(22.44 * GIB, rel=1e-3)  # as measured on two H200
    assert config_of("qwen3-1.7B", device="cpu").checkpoint_bytes() == 12 * total_parameters(config)
    adapters = config_of("qwen3-4B", lora_rank=32, no_save_optim=True, advantage_estimator="ppo")
    assert adapters.checkpoint_bytes() == 2 * 36 * adapter_parameters(adapters, adapters.lora)
    # A critic has no adapters, and a head of one row where an untied model has the output layer.
    assert adapters.roles[1].checkpoint_bytes == 2 * total_parameters(adapters)
    untied = config_of("qwen3-8B", advantage_estimator="ppo")
    critic = 14 * (total_parameters(untied) - 151_935 * 4096)
    assert [role.checkpoint_bytes for role in untied.roles] == [untied.checkpoint_bytes(), critic]
    assert untied.bytes_of_a_save == untied.checkpoint_bytes() + critic
    alone = config_of("qwen3-8B")
    assert alone.bytes_of_a_save == alone.checkpoint_bytes()


@pytest.mark.parametrize(("ep", "etp"), [(1, 1), (8, 1), (8, 2)])
def test_experts_are_spread_over_their_ranks(ep, etp):
    """Of 30B-A3B, 48 layers of 128 experts of 3 * 2048 * 768 are divided, 1,541,093,376 parameters are not."""
    model = source("qwen3-30B-A3B", ROOT)
    held = stage_parameters(model, stage=0, layers=48, tp=1, pp=1, ep=ep, etp=etp)
    assert held == 1_541_093_376 + 48 * 128 * 3 * 2048 * 768 // (ep * etp)


def test_uneven_stages_get_the_layers_that_were_asked_for():
    assert stage_layers(36, 4, first=6, last=8) == [6, 11, 11, 8]
    assert stage_layers(28, 2, last=13) == [15, 13]


def test_235b_a22b_has_235_billion_parameters_of_which_a_token_meets_22():
    """From the published config.json: 94 layers of width 4096, 64 heads and 4 key heads of 128, 128 experts of 1536
    of which 8 are chosen, 151,936 words in two matrices."""
    attention = 4096 * (8192 + 2 * 512) + 8192 * 4096
    norms_and_router = 2 * 4096 + 2 * 128 + 128 * 4096
    expert = 3 * 4096 * 1536
    rest = 2 * 151_936 * 4096 + 4096
    model = source("qwen3-235B-A22B", ROOT)
    assert total_parameters(model) == 94 * (attention + norms_and_router + 128 * expert) + rest == 235_093_634_560
    assert active_parameters(model) == 94 * (attention + norms_and_router + 8 * expert) + rest == 22_190_763_520


RECOMPUTE = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
PACKED = dict(use_dynamic_batch_size=True, debug_train_only=True)


def work(mean: float, samples: int = 256) -> Workload:
    return Workload.from_means(samples, 0, mean)


def test_memory_of_4b_on_one_gpu_by_hand():
    """Qwen3-4B, 16,384 tokens: 4,022,468,096 parameters and 256 padded words of 2560 (18 bytes each); a layer keeps
    111,744 bytes of a token."""
    memory = trainer_memory(config_of("qwen3-4B", max_tokens_per_gpu=16384, **PACKED), work(2000))
    parameters = 4_022_468_096  # 151,936 words are a multiple of 128 already
    assert (memory.weights, memory.gradients, memory.optimizer) == (2 * parameters, 4 * parameters, 12 * parameters)
    kept = 2 * (4 * 2560 + 2 * (4096 + 2 * 1024) + 4096 + 3 * 9728) + 4 * 32
    assert kept == 111_744
    backward = 2 * 3 * 9728 + 2 * 2 * 2560
    assert memory.activations == 16384 * (36 * kept + 3 * 2 * 2560 + backward)
    assert memory.others == 0 and 0 < memory.logits < GIB
    assert memory.allocated / GIB == pytest.approx(130.8, abs=0.1)


def test_memory_of_32b_on_32_gpus_by_hand():
    """The DAPO recipe's layout, TP8 with sequence parallelism and DP4, and what its optimizer shards weigh."""
    config = config_of(
        "qwen2.5-32B", actor_num_nodes=4, actor_num_gpus_per_node=8, tensor_model_parallel_size=8,
        sequence_parallel=True, max_tokens_per_gpu=16384, **PACKED, **RECOMPUTE,
    )  # fmt: skip
    layer = (5120 * (2 * 5120 + 2 * 1024) + 3 * 5120 * 27648 + 5120 + 2 * 1024) // 8 + 2 * 5120
    rank = 64 * layer + 2 * (152_064 + 512) // 8 * 5120 + 5120  # 152,064 words are padded to 1,024 x 149
    memory = trainer_memory(config, work(2000))
    assert (memory.weights, memory.gradients) == (2 * rank, 4 * rank)
    assert memory.optimizer == 12 * (rank // 4)


def test_full_recomputation_and_more_ranks_need_less_memory():
    dense = config_of("qwen3-4B", max_tokens_per_gpu=16384, **PACKED)
    recomputed = config_of("qwen3-4B", max_tokens_per_gpu=16384, **PACKED, **RECOMPUTE)
    assert trainer_memory(recomputed, work(2000)).activations < trainer_memory(dense, work(2000)).activations / 10
    two = config_of(
        "qwen3-4B", max_tokens_per_gpu=16384, **PACKED, actor_num_gpus_per_node=2, tensor_model_parallel_size=2,
        sequence_parallel=True,
    )  # fmt: skip
    assert trainer_memory(two, work(2000)).total < 0.55 * trainer_memory(dense, work(2000)).total


@pytest.mark.parametrize("tp", [1, 2])
def test_adapters_are_all_that_has_gradients_and_optimizer_state(tp):
    """PEFT's count for rank 16 on all linear layers of Qwen3-4B is 33,030,144; A of the fused layers is shared here."""
    config = config_of("qwen3-4B", lora_rank=16, actor_num_gpus_per_node=tp, tensor_model_parallel_size=tp)
    ends = {"q": (2560, 4096), "kv": (2560, 2048), "o": (4096, 2560), "gate, up": (2560, 19456), "down": (9728, 2560)}
    in_peft = 16 * (sum(a + b for a, b in ends.values()) + 2 * 2560)  # one A each for k and v, gate and up
    assert 36 * in_peft == 33_030_144
    split = 36 * 16 * (4096 + 2048 + 4096 + 19456 + 9728)
    whole = 36 * 16 * 4 * 2560
    memory = trainer_memory(config, work(2000))
    assert memory.gradients == 4 * (whole + split // tp)
    assert memory.optimizer == 12 * (whole + split // tp)
    full = trainer_memory(config_of("qwen3-4B"), work(2000))
    assert 0 < memory.weights * tp - full.weights < 0.02 * full.weights


@pytest.mark.parametrize(("ep", "etp"), [(1, 1), (8, 1), (4, 2)])
def test_adapters_of_experts_are_spread_over_their_ranks(ep, etp):
    """30B-A3B, rank 8, 48 layers of 128 experts of width 768: of an expert A [8, 2048] and B [2048, 8] are whole on the
    ranks that share it, B [2, 768, 8] and A [8, 768] are split."""
    config = config_of(
        "qwen3-30B-A3B", lora_rank=8, actor_num_gpus_per_node=8, expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
    )  # fmt: skip
    attention = 48 * 8 * (2048 + 4096 + 2 * 512 + 4096 + 2048)
    experts = 48 * 128 // ep * 8 * (2 * 2048 + 3 * 768 // etp)
    memory = trainer_memory(config, work(2000))
    assert memory.gradients == 4 * (attention + experts)
    assert memory.optimizer == 12 * (attention // 8 + experts * ep * etp // 8)
    assert config.checkpoint_bytes() == 14 * (attention + 48 * 128 * 8 * (2 * 2048 + 3 * 768))


def test_an_engine_with_adapters_apart_has_room_for_two_and_gets_only_them():
    """4B, rank 32. SGLang holds A of q, k and v, and of gate and up, one by one."""
    options = dict(lora_rank=32, colocate=True, offload_train=True, offload_rollout=True)
    apart = config_of("qwen3-4B", **options, lora_weight_update="adapters")
    merged = config_of("qwen3-4B", **options)
    card = CARDS["h200"]
    room = 36 * 32 * (3 * 2560 + 4096 + 2 * 1024 + 4096 + 2560 + 2 * 2560 + 2 * 9728 + 9728 + 2560)
    engine, without = engine_memory(apart, card), engine_memory(merged, card)
    assert (engine.adapters, without.adapters) == (2 * 2 * room, 0)
    assert engine.total == without.total and engine.kv_cache == without.kv_cache - engine.adapters
    assert sync_seconds(apart, card) == pytest.approx(SYNC_SECONDS + 2 * 2 * room / card.host_link)
    assert sync_seconds(apart, card) < sync_seconds(merged, card)
    (_, _, kept), (_, _, given_back) = (memory_of_moments(c, card, work(2000)) for c in (apart, merged))
    assert kept["training"] - given_back["training"] == engine.weights + engine.adapters


def test_pipeline_stages_keep_one_micro_batch_for_each_stage_behind_them():
    config = config_of(
        "qwen3-8B", actor_num_gpus_per_node=4, pipeline_model_parallel_size=4, max_tokens_per_gpu=4096, **PACKED
    )
    stages = [stage_memory(config.roles, work(1000), stage).activations for stage in range(4)]
    once = stages[2] - stages[3]
    assert stages[0] - stages[1] == pytest.approx(stages[1] - stages[2]) == pytest.approx(once, rel=0.02)
    single = config_of("qwen3-8B", max_tokens_per_gpu=4096, **PACKED)
    assert stages[0] == pytest.approx(trainer_memory(single, work(1000)).activations, rel=0.02)


def test_a_sample_longer_than_the_limit_counts_with_all_its_tokens():
    config = config_of("qwen3-4B", max_tokens_per_gpu=1024, **PACKED)
    whole = config_of("qwen3-4B", max_tokens_per_gpu=8192, **PACKED)
    assert trainer_memory(config, work(4096)).activations == trainer_memory(whole, work(4096)).activations


def test_an_optimizer_on_the_host_leaves_the_gpu_and_the_precision_aware_one_saves_two_bytes():
    aware, away = {"use_precision_aware_optimizer": True}, {"optimizer_cpu_offload": True}
    plain, halved, *hosted = (
        trainer_memory(config_of("qwen3-4B", max_tokens_per_gpu=4096, **PACKED, **extra), work(500))
        for extra in ({}, aware, away, aware | away)
    )
    assert plain.optimizer * 10 == halved.optimizer * 12
    for memory in hosted:  # the optimizer on the host has whole master weights, whatever the other flag says
        assert (memory.optimizer, memory.host_optimizer) == (0, plain.optimizer)


def test_trainer_and_engine_on_the_same_gpus_take_turns():
    config = config_of("qwen3-4B", colocate=True, use_dynamic_batch_size=True, max_tokens_per_gpu=4096)
    turns = plan_of(config, "h100", 100, 500)
    assert turns.engine is not None
    assert turns.moments["generating"] == turns.engine.total + turns.trainer.runtime
    assert turns.moments["training"] == turns.trainer.total + turns.engine.runtime
    assert turns.host == host_memory(config, turns.trainer) == turns.trainer.weights + turns.trainer.optimizer
    together = replace(config, offload_train=False, offload_rollout=False)
    together = plan_of(together, "h100", 100, 500)
    assert together.resident >= together.trainer.total + together.engine.total > turns.resident
    assert not together.fits and together.host == 0


def test_a_critic_in_the_same_processes_weighs_as_much_as_a_model_without_output_layer():
    options = dict(max_tokens_per_gpu=4096, use_dynamic_batch_size=True, debug_train_only=True)
    memory = trainer_memory(config_of("qwen3-8B", advantage_estimator="ppo", **options), work(500))
    assert memory.others == 18 * (total_parameters(source("qwen3-8B", ROOT)) - 151_936 * 4096)
    away = trainer_memory(
        config_of("qwen3-8B", advantage_estimator="ppo", optimizer_cpu_offload=True, **options), work(500)
    )
    assert away.others * 18 == memory.others * 6 and away.host_optimizer == memory.optimizer + memory.others * 12 // 18
    apart = config_of("qwen3-8B", advantage_estimator="ppo", critic_num_gpus_per_node=1, **options)
    assert trainer_memory(apart, work(500)).others == 0


def test_a_critic_apart_needs_gpus_memory_and_time_of_its_own():
    """Qwen3-4B, whose tied embedding the critic has alone: 18 bytes a parameter, and activations like the actor's."""
    options = dict(advantage_estimator="ppo", actor_num_gpus_per_node=4, **PACKED, max_tokens_per_gpu=4096)
    plans = {
        gpus: plan_of(config_of("qwen3-4B", critic_num_gpus_per_node=gpus, **options), "h200", 0, 500)
        for gpus in (1, 2, 4)
    }
    assert [plan.gpus for plan in plans.values()] == [5, 6, 8]
    alone = trainer_memory(config_of("qwen3-4B", max_tokens_per_gpu=4096, **PACKED), plans[1].workload)
    expected = 18 * total_parameters(source("qwen3-4B", ROOT)) + alone.activations + alone.runtime
    assert plans[1].moments["training the critic"] == expected
    times = [plan.time.others for plan in plans.values()]
    assert times[0] > 1.5 * times[1] > 2 * times[2] > 0


def test_engines_that_cannot_hold_one_sample_do_not_fit():
    config = config_of(
        "qwen2.5-32B", actor_num_gpus_per_node=8, rollout_num_gpus=8, use_dynamic_batch_size=True,
        max_tokens_per_gpu=8192, tensor_model_parallel_size=8, sequence_parallel=True, optimizer_cpu_offload=True,
        rollout_max_response_len=32000, **RECOMPUTE,
    )  # fmt: skip
    plan = plan_of(config, "h100", 200, 16000)
    assert not plan.fits and "an engine's cache holds" in plan.problems[0]
    changes = changes_that_fit(config, CARDS["h100"], plan.workload)
    assert any("--rollout-num-gpus-per-engine" in change.flags for change in changes)


SHORT_OF_MEMORY = {
    "32B on 8 H100": (
        "qwen2.5-32B",
        "--tensor-model-parallel-size 8 --sequence-parallel --max-tokens-per-gpu 16384 --actor-num-gpus-per-node 8",
    ),
    "32B without any parallelism": (
        "qwen2.5-32B", "--colocate --max-tokens-per-gpu 8192 --actor-num-nodes 2 --actor-num-gpus-per-node 8"
    ),
    "parts that are recomputed already": (
        "qwen3-8B",
        "--debug-train-only --max-tokens-per-gpu 16384 --actor-num-gpus-per-node 8 --recompute-granularity selective "
        "--recompute-modules layernorm mlp",
    ),
    "32B, and engines on 4 GPUs": (
        "qwen2.5-32B",
        "--tensor-model-parallel-size 8 --sequence-parallel --max-tokens-per-gpu 4096 --actor-num-gpus-per-node 8 "
        "--actor-num-nodes 4 --rollout-num-gpus 4 --rollout-max-response-len 32000",
    ),
    "235B on 256 H100": (
        "qwen3-235B-A22B",
        "--colocate --max-tokens-per-gpu 8192 --actor-num-nodes 32 --actor-num-gpus-per-node 8 "
        "--rollout-num-gpus-per-engine 8",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SHORT_OF_MEMORY)
def test_what_is_suggested_fits_when_it_is_added_to_the_flags(case, capsys):
    name, layout = SHORT_OF_MEMORY[case]
    flags = [
        *flags_of(name), *layout.split(), "--use-dynamic-batch-size", "--rollout-batch-size", "256",
        "--n-samples-per-prompt", "8", "--json", "--mean-response", "2000",
    ]  # fmt: skip
    assert main(["plan", *flags]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["changes"]
    for change in found["changes"]:
        assert main(["plan", *flags, *change["flags"].split()]) == 0, change["flags"]
        again = json.loads(capsys.readouterr().out)
        assert (again["resident"], again["gpus"]) == (change["resident"], change["gpus"])
        assert (again["engine"] is None) == (found["engine"] is None)


FITTING = {
    "32B, the recipe's layout on 64 GPUs": (
        "qwen2.5-32B",
        "--colocate --tensor-model-parallel-size 8 --sequence-parallel --max-tokens-per-gpu 18432 --actor-num-nodes 8 "
        "--actor-num-gpus-per-node 8 --rollout-num-gpus-per-engine 4",
    ),
    "4B that recomputes without need": ("qwen3-4B", "--max-tokens-per-gpu 8192 --actor-num-gpus-per-node 4"),
    "stages of equal length": (
        "qwen3-14B", "--debug-train-only --max-tokens-per-gpu 16384 --actor-num-gpus-per-node 2 "
        "--use-precision-aware-optimizer --pipeline-model-parallel-size 2",
    ),
    "stages of which the first is short": (
        "qwen3-14B", "--debug-train-only --max-tokens-per-gpu 16384 --actor-num-gpus-per-node 2 "
        "--use-precision-aware-optimizer --pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 18",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FITTING)
def test_what_is_suggested_saves_time_when_it_is_added_to_the_flags(case, capsys):
    name, layout = FITTING[case]
    flags = [
        *flags_of(name), *layout.split(), "--use-dynamic-batch-size", "--rollout-batch-size", "256",
        "--n-samples-per-prompt", "8", "--json", "--mean-response", "2000", "--card", "h200",
        "--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1",
    ]  # fmt: skip
    assert main(["plan", *flags]) == 0
    found = json.loads(capsys.readouterr().out)
    seconds, changes = found["step_seconds"], found["changes"]
    assert changes
    for change in changes:
        assert main(["plan", *flags, *change["flags"].split()]) == 0, change["flags"]
        again = json.loads(capsys.readouterr().out)
        assert (again["step_seconds"], again["resident"], again["gpus"]) == (
            change["seconds"], change["resident"], found["gpus"]
        )  # fmt: skip
        assert again["step_seconds"] < 0.97 * seconds
        seconds = again["step_seconds"]
    expected = {"4B": "--recompute-granularity none", "st": "--decoder-last-pipeline-num-layers 19"}.get(case[:2], "")
    assert expected in changes[-1]["flags"]


def test_the_recipes_own_flags_can_be_planned_as_the_documentation_says(capsys):
    """4 hosts of H100 are enough for the 32B recipe, 1 is not."""
    found = {}
    for nodes in ("1", "4"):
        script = ROOT / "examples" / "retool" / "retool_qwen2.5_32b_dapo.sh"
        env = {**os.environ, "PYTHON": "echo", "NUM_NODES": nodes, "MODEL": "", "RAY_ADDRESS": ""}
        line = subprocess.run(["bash", script], env=env, check=True, capture_output=True, text=True).stdout
        found[nodes] = main(["plan", "--mean-response", "4000", *line.split()[2:]])
        assert f"32.76B parameters on {8 * int(nodes)} x H100" in capsys.readouterr().out
    assert found == {"1": 1, "4": 0}


def test_time_grows_with_tokens_and_shrinks_with_gpus():
    config, card = config_of("qwen3-4B", debug_train_only=True), CARDS["h200"]
    short, long = (train_seconds(config, card, work(mean)) for mean in (1000, 4000))
    assert 3 * short < long < 6 * short
    four = config_of("qwen3-4B", debug_train_only=True, actor_num_gpus_per_node=4)
    assert train_seconds(four, card, work(4000)) < long / 3


def test_recomputation_adapters_and_stages_cost_what_their_operations_say():
    card, load = CARDS["h200"], work(2000)
    options = dict(max_tokens_per_gpu=16384, **PACKED)
    plain = train_seconds(config_of("qwen3-8B", **options), card, load)
    full = train_seconds(config_of("qwen3-8B", **options, **RECOMPUTE), card, load)
    lora = train_seconds(config_of("qwen3-8B", **options, lora_rank=16), card, load)
    assert 1.25 * plain < full < 4 / 3 * plain
    assert 0.65 * plain < lora < 0.85 * plain


def test_kept_logits_cost_their_bytes_and_save_a_product():
    """1.7B: 151,936 columns of 4 bytes for each learned token, 2 x 2,048 x 151,936 operations to make them again."""
    workload = Workload(4, 0.0, 4096, 4096, 4096)
    plain, all_kept, half = (
        config_of("qwen3-1.7B", use_dynamic_batch_size=True, max_tokens_per_gpu=16384, keep_logits_gib=gib)
        for gib in (0.0, 100.0, 16384 * 151_936 * 2 / GIB)
    )
    size = 16384 * 151_936 * 4
    memory = [trainer_memory(config, workload).logits for config in (plain, half, all_kept)]
    assert memory[2] - memory[1] == pytest.approx(size / 2, rel=1e-3)
    seconds = [train_seconds(config, CARDS["h200"], workload) for config in (plain, half, all_kept)]
    product = 16384 * 2 * 2048 * 151_936 / (CARDS["h200"].peak_flops * GEMM_SHARE)
    assert seconds[0] - seconds[2] == pytest.approx(product, rel=1e-3)
    assert seconds[0] - seconds[1] == pytest.approx(product / 2, rel=1e-3)


def test_a_further_micro_batch_costs_the_slowest_stage_and_the_first_one_all_of_them():
    config = config_of(
        "qwen3-8B", max_tokens_per_gpu=16384, **PACKED, actor_num_gpus_per_node=4, pipeline_model_parallel_size=4
    )
    few, many = work(2048, 4 * 8), work(2048, 64 * 8)  # 8 samples fill a micro-batch
    stages = [stage.forward + stage.backward for stage in stage_passes(config, CARDS["h200"], few, 4)]
    took = [train_seconds(config, CARDS["h200"], load) for load in (few, many)]
    assert took[1] - took[0] == pytest.approx(60 * max(stages))
    assert sum(stages) + 3 * max(stages) < took[0] < 1.1 * (sum(stages) + 3 * max(stages))


def test_a_group_wider_than_a_host_works_at_the_networks_rate():
    options = dict(max_tokens_per_gpu=16384, tensor_model_parallel_size=8, sequence_parallel=True, **PACKED)
    inside = config_of("qwen3-8B", actor_num_gpus_per_node=8, **options)
    across = config_of("qwen3-8B", actor_num_nodes=2, actor_num_gpus_per_node=4, **options)
    assert train_seconds(across, CARDS["h200"], work(2000)) > 1.5 * train_seconds(inside, CARDS["h200"], work(2000))


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


WRONG = {
    "--rollout-num-gpus-per-engine 0": "--rollout-num-gpus-per-engine must be at least 1",
    "--rollout-num-gpus 1 --rollout-num-gpus-per-engine 2": "--rollout-num-gpus-per-engine 2 does not divide the 1",
    "--rollout-num-gpus -2": "--rollout-num-gpus must be at least 1",
    "--micro-batch-size 0": "--micro-batch-size must be at least 1",
    "--global-batch-size 100": "256 samples must be a multiple of --global-batch-size 100",
    "--n-samples-per-prompt 0": "--n-samples-per-prompt must be at least 1",
    "--mean-prompt -5": "--mean-prompt must be at least 1",
    "--mean-response 0": "--mean-response must be at least 1",
    "--keep-logits-gib nan": "--keep-logits-gib must be at least 0",
    "--recompute-granularity full": "needs --recompute-method and --recompute-num-layers",
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 0": "must be at least 1, got 0",
    "--recompute-granularity selective --recompute-num-layers 1": "--recompute-num-layers 1 is of",
    "--rollout-max-context-len 0": "--rollout-max-context-len must be at least 1",
    "--advantage-estimator ppo --critic-num-gpus-per-node 0": "--critic-num-gpus-per-node must be at least 1",
    "--debug-rollout-only": "--debug-rollout-only trains nothing",
}


@pytest.mark.parametrize("extra", WRONG)
def test_what_a_run_would_be_refused_for_is_not_planned(extra, capsys):
    flags = [*flags_of("qwen3-4B"), "--rollout-batch-size", "32", "--n-samples-per-prompt", "8"]
    assert main(["plan", *flags, *extra.split()]) == 2
    error = capsys.readouterr().err
    assert WRONG[extra] in error and error.count("\n") == 1


def test_no_engine_is_suggested_that_cannot_start():
    """28 query heads: 4 workers, and not 8."""
    config = config_of(
        "qwen2.5-7B", actor_num_gpus_per_node=8, rollout_num_gpus=8, sglang_mem_fraction_static=0.3,
        rollout_max_response_len=200_000, use_dynamic_batch_size=True, max_tokens_per_gpu=8192,
        tensor_model_parallel_size=4, sequence_parallel=True, **RECOMPUTE,
    )  # fmt: skip
    plan = plan_of(config, "a100", 256, 16000)
    assert "an engine's cache holds" in plan.problems[0]
    changes = changes_that_fit(config, CARDS["a100"], plan.workload)
    assert [change.flags for change in changes] == ["--rollout-num-gpus-per-engine 4"]


def test_engines_that_others_run_are_left_as_they_are():
    config = config_of("qwen3-4B", rollout_external_urls=["http://a:1", "http://b:1"], sglang_mem_fraction_static=0.3)
    plan = plan_of(config, "h200", 256, 4000)
    changes = changes_that_speed_up(config, CARDS["h200"], plan.workload, plan.time.total)
    assert plan.fits and not any("engine" in change.flags or "sglang" in change.flags for change in changes)


def test_an_engines_cards_are_of_one_host_whatever_hosts_the_trainer_has():
    engine = dict(rollout_num_gpus=4, rollout_num_gpus_per_engine=4)
    one, four = (config_of("qwen3-4B", actor_num_gpus_per_node=gpus, **engine) for gpus in (1, 4))
    load = Workload.from_means(256, 100, 1000)
    assert generate_seconds(one, CARDS["h100"], load) == generate_seconds(four, CARDS["h100"], load)


def test_a_cache_of_limited_tokens_takes_their_bytes_and_must_hold_a_sample():
    """Qwen3-4B: 36 layers of 8 key and 8 value heads of 128 in bf16, half of them on each of two GPUs."""
    engine = dict(rollout_num_gpus_per_engine=2, sglang_max_total_tokens=1000, rollout_max_response_len=2000)
    plan = plan_of(config_of("qwen3-4B", **engine), "h100", 100, 500)
    assert plan.engine is not None
    assert (plan.engine.kv_tokens, plan.engine.kv_cache) == (1000, 1000 * 36 * 2 * 8 * 128 * 2 // 2)
    assert "an engine's cache holds 1,000 tokens" in plan.problems[-1]


def test_json_and_page_call_the_further_model_by_its_name(capsys):
    flags = [*flags_of("qwen3-4B"), "--rollout-batch-size", "32", "--debug-train-only", "--advantage-estimator", "ppo"]
    main(["plan", "--json", *flags])
    found = json.loads(capsys.readouterr().out)
    assert found["trainer"]["critic"] > 0 and found["time"]["critic"] > 0
    main(["plan", *flags])
    page = capsys.readouterr().out
    assert page.count("\n  critic ") == 2 and "others" not in page + json.dumps(found)


@pytest.mark.parametrize(
    ("layout", "share"),
    [
        ({}, 1.0),
        ({"actor_num_gpus_per_node": 4}, 1.0),
        ({"actor_num_gpus_per_node": 4, "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}, 1.0),
        ({"actor_num_nodes": 2, "actor_num_gpus_per_node": 2, "pipeline_model_parallel_size": 2}, 0.5),
        ({"actor_num_nodes": 2, "actor_num_gpus_per_node": 2, "tensor_model_parallel_size": 4}, 0.5),
        ({"actor_num_gpus_per_node": 4, "no_async_save": True}, 0.0),
        ({"actor_num_gpus_per_node": 4, "save": None}, 0.0),
    ],
)
def test_the_copy_that_a_checkpoint_is_written_from_is_counted_on_the_host_that_has_most_of_it(layout, share) -> None:
    model = {
        "num_layers": 4, "hidden_size": 256, "ffn_hidden_size": 512, "num_attention_heads": 4, "vocab_size": 1000,
        "max_position_embeddings": 512, "device": "cuda",
    }  # fmt: skip
    config = Config(**{**model, "save": "save", **layout})
    trainer = TrainerMemory(weights=0, gradients=0, optimizer=0, others=0, activations=0, logits=0)
    assert host_memory(config, trainer) == int(share * config.bytes_of_a_save)
