"""The trainer in real processes: gradients in every layout, optimizer, checkpoints.

Two groups of processes do all the work (`_one_process`, then `_two_processes`); tests look at what they returned.
"""

from __future__ import annotations

import dataclasses
import json
import re
import resource
import shutil
import statistics
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from dist_utils import run_distributed
from trainer_utils import VOCAB_SIZE, gradients, make_trainer, random_samples, sharpen, tiny_config, weights

from slime_retool import run_folder
from slime_retool.errors import SaveError
from slime_retool.types import RolloutBatch, TrainSample

KL = {"use_kl_loss": True, "kl_loss_coef": 0.3, "kl_loss_type": "low_var_kl", "entropy_coef": 0.02}
RL = {**KL, "rollout_temperature": 0.8, "eps_clip": 0.1, "use_rollout_logprobs": True}
TP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2_overlapped": {"overlap_grad_reduce": True},
    "dp2": {},
    "dp2_one_each": {"use_dynamic_batch_size": False},
    "tp2": TP2,
    "tp2_sp": {**TP2, "sequence_parallel": True},
    "pp2": PP2,
    "pp2_one_each": {**PP2, "use_dynamic_batch_size": False},
}
PACKINGS: dict[str, dict[str, Any]] = {
    "one_each": {"use_dynamic_batch_size": False},
    "pairs": {"use_dynamic_batch_size": False, "micro_batch_size": 2},
    "all_in_one": {"max_tokens_per_gpu": 1000},
}
DAMAGED = [("no common.pt", "common.pt", None)] + [
    (f"{what} {file}", file, size)
    for file in (".metadata", "common.pt", "rng.pt", "trainer_state.json")
    for what, size in (("empty", 0), ("half of", 60))
]
METRICS = ("loss", "pg_loss", "clip_fraction", "ppo_kl", "kl_loss", "entropy", "logprob_abs_diff", "grad_norm")


def _rl_config(root: str, tied: bool, **overrides: Any) -> Any:
    name = "tied" if tied else "untied"
    folders = {"ref_load": f"{root}/{name}_ref", "load": f"{root}/{name}"}
    return tiny_config(**{**RL, **folders, "untie_embeddings_and_output_weights": not tied, **overrides})


def _measure(rank: int, world_size: int, config: Any, samples: Any = None, rollouts: int = 1) -> dict[str, Any]:
    """Load, train, and report metrics of every rollout, the last gradient, log-probs and weights."""
    trainer = make_trainer(rank, world_size, config)
    next_rollout, _ = trainer.load()
    batch = RolloutBatch(random_samples() if samples is None else samples)
    log_probs = trainer.log_probs(batch.samples)
    metrics = [trainer.train(batch, next_rollout + i) for i in range(rollouts)]
    result = {
        "log_probs": log_probs, "metrics": metrics, "grads": gradients(trainer), "weights": weights(trainer),
        "next": next_rollout,
    }  # fmt: skip
    trainer.shutdown()
    return result


def _one_process(rank: int, world_size: int, root: str) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for tied in (True, False):
        # A reference model, and a policy a few optimizer steps away from it.
        name = "tied" if tied else "untied"
        config = _rl_config(root, tied, loss_type="sft_loss", save=f"{root}/{name}_ref", load=None)
        trainer = make_trainer(rank, world_size, config)
        sharpen(trainer)
        trainer.save(0, {})
        out[f"{name}/start"] = weights(trainer)
        trainer.actor.config = dataclasses.replace(config, save=f"{root}/{name}")
        for step in range(3):
            trainer.train(RolloutBatch(random_samples(seed=step)), step)
        trainer.save(2, {"epoch": 1, "order": [3, 1, 2]})
        out[f"{name}/policy"] = weights(trainer)
        trainer.shutdown()
        out[f"{name}/dp1"] = _measure(rank, world_size, _rl_config(root, tied))
    for name, overrides in PACKINGS.items():
        out[name] = _measure(rank, world_size, _rl_config(root, True, **overrides))
    shuffled = random_samples()[::-1]
    out["reversed"] = _measure(rank, world_size, _rl_config(root, True), shuffled)
    out["per_token"] = _measure(rank, world_size, _rl_config(root, True, calculate_per_token_loss=True))
    out["two_samples"] = _measure(rank, world_size, _rl_config(root, True), random_samples(2, seed=5)[:1])
    constant = _rl_config(root, True, loss_constant_length=1000)
    out["constant_length"] = _measure(rank, world_size, constant)
    nothing = [dataclasses.replace(s, loss_mask=[0] * s.length) for s in random_samples()]
    out["no_learned_token"] = _measure(rank, world_size, _rl_config(root, True), nothing)
    out["adam"] = _adam(rank, world_size, root)
    out["resume"] = _resume(rank, world_size, root)
    out["skipped"] = _skipped(rank, world_size, root)
    out["killed"] = _killed(rank, world_size, root)
    out["full"] = _full(rank, world_size, root)
    out["errors"] = _errors(rank, world_size, root)
    out["steps"] = _measure(
        rank, world_size, _rl_config(root, True, use_rollout_logprobs=False, global_batch_size=2), rollouts=2
    )
    return out


def _adam(rank: int, world_size: int, root: str) -> dict[str, Any]:
    """Four steps of the trainer, and torch's AdamW on the same gradients."""
    options = {"weight_decay": 0.1, "adam_beta2": 0.95, "clip_grad": 0.5, "lr_warmup_iters": 2}
    trainer = make_trainer(rank, world_size, _rl_config(root, True, load=None, **options))
    trainer.load()
    parameters = dict(trainer.module.named_parameters())
    copies = {name: p.detach().clone().requires_grad_() for name, p in parameters.items()}
    matrices = [p for p in copies.values() if p.dim() > 1]
    vectors = [p for p in copies.values() if p.dim() == 1]
    adam = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}], betas=(0.9, 0.95)
    )
    differences, norms = [], []
    for step in range(4):
        metrics = trainer.train(RolloutBatch(random_samples(seed=step)), step)
        for group in adam.param_groups:
            group["lr"] = metrics["train/lr"]
        for name, copy in copies.items():
            copy.grad = parameters[name].main_grad.clone()  # the trainer has clipped it in place
        norms.append(float(torch.stack([p.grad.norm() for p in copies.values()]).norm()))
        adam.step()
        differences.append(max(float((copies[name] - p).abs().max()) for name, p in parameters.items()))
    moved = max(float((p - q).abs().max()) for p, q in zip(parameters.values(), copies.values(), strict=True))
    trainer.shutdown()
    return {"differences": differences, "norms": norms, "moved": moved}


def _resume(rank: int, world_size: int, root: str) -> dict[str, Any]:
    """Five rollouts in one go; and three, a save, a save that dies half-way, a new trainer, two more."""
    folder = f"{root}/resume{world_size}"
    config = _rl_config(
        root, True, load=folder, save=folder, lr_decay_style="cosine", lr_decay_iters=10, lr_warmup_iters=2,
        use_rollout_logprobs=False, global_batch_size=3, clip_grad=1.0,
    )  # fmt: skip
    batches = [RolloutBatch(random_samples(seed=10 + i)) for i in range(5)]

    def keep(metrics: dict[str, float]) -> dict[str, float]:
        return {name: value for name, value in metrics.items() if name.startswith("train/")}

    trainer = make_trainer(rank, world_size, config)
    start = trainer.load()
    straight = [keep(trainer.train(batch, i)) for i, batch in enumerate(batches[:3])]
    trainer.save(2, {"epoch": 4})
    straight += [keep(trainer.train(batch, 3 + i)) for i, batch in enumerate(batches[3:])]
    final = weights(trainer)
    trainer.shutdown()
    # What a kill during the next save leaves behind.
    broken = Path(folder) / "iter_0000003.part"
    broken.mkdir(exist_ok=True)
    (broken / "common.pt").write_text("half")
    trainer = make_trainer(rank, world_size, config)
    state = trainer.load()
    resumed = [keep(trainer.train(batch, 3 + i)) for i, batch in enumerate(batches[3:])]
    result = {
        "start": start, "state": state, "straight": straight[3:], "resumed": resumed, "final": final,
        "weights": weights(trainer),
    }  # fmt: skip
    trainer.save(3, {})  # over the broken one
    result["saved_again"] = sorted(p.name for p in Path(folder).iterdir())
    trainer.shutdown()
    return result


def _skipped(rank: int, world_size: int, root: str) -> dict[str, Any]:
    """One step whose gradient is not finite, a save, a new trainer, and a good step in both."""
    config = _rl_config(root, True, load=f"{root}/skipped", save=f"{root}/skipped", loss_type="sft_loss")
    trainer = make_trainer(rank, world_size, config)
    trainer.load()
    loss = trainer.actor.loss

    def broken(batch: Any, output: Any) -> Any:
        result = loss(batch, output)
        return dataclasses.replace(result, loss=result.loss * float("nan"))

    trainer.actor.loss = broken
    skipped = trainer.train(RolloutBatch(random_samples()), 0)["train/skipped_steps"]
    trainer.save(0, {})
    trainer.actor.loss = loss
    trainer.train(RolloutBatch(random_samples()), 1)
    straight = weights(trainer)
    trainer.shutdown()
    trainer = make_trainer(rank, world_size, config)
    next_rollout, _ = trainer.load()
    trainer.train(RolloutBatch(random_samples()), next_rollout)
    result = {"skipped": skipped, "next": next_rollout, "straight": straight, "resumed": weights(trainer)}
    trainer.shutdown()
    return result


def _killed(rank: int, world_size: int, root: str) -> dict[str, Any]:
    """A second run into the folder of a first is killed while it deletes what it replaces."""
    config = _rl_config(root, True, load=f"{root}/killed", save=f"{root}/killed")
    trainer = make_trainer(rank, world_size, config)
    trainer.load()
    trainer.save(4, {"run": 1})

    def killed(path: Path, **_: Any) -> None:
        if Path(path).exists():
            (Path(path) / ".metadata").unlink()
            raise KeyboardInterrupt

    with mock.patch.object(shutil, "rmtree", killed), pytest.raises(KeyboardInterrupt):
        trainer.save(4, {"run": 2})
    trainer.shutdown()
    trainer = make_trainer(rank, world_size, config)
    found = trainer.load()
    trainer.save(5, {})
    trainer.shutdown()
    return {"found": found, "left": sorted(path.name for path in Path(f"{root}/killed").iterdir())}


def _full(rank: int, world_size: int, root: str) -> dict[str, Any]:
    """A save that the disk does not take, and one after room was made. A limit on the size of files stands for it."""
    folder = Path(root) / f"full{world_size}"
    config = _rl_config(root, True, load=str(folder), save=str(folder), loss_type="sft_loss")
    trainer = make_trainer(rank, world_size, config)
    trainer.load()
    trainer.train(RolloutBatch(random_samples()), 0)
    trainer.save(0, {})
    written = sum(path.stat().st_size for path in (folder / "iter_0000000").glob("*.distcp"))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (written // 8, limits[1]))
    rmtree, nearest = shutil.rmtree, run_folder.nearest_existing

    def late_rmtree(path: Path, **options: Any) -> None:
        time.sleep(0.5)
        rmtree(path, **options)

    def nearest_before_it_goes(path: str) -> str:
        """Rank 0 deletes what there was of the checkpoint while others look how much room there is."""
        found = nearest(path)
        while list(folder.glob("*.part")):
            time.sleep(0.01)
        return found

    try:
        with (
            mock.patch.object(shutil, "rmtree", late_rmtree),
            mock.patch.object(run_folder, "nearest_existing", nearest_before_it_goes),
        ):
            trainer.save(1, {})
        message = "saved"
    except SaveError as error:
        message = str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    torch.distributed.barrier()  # rank 0 has deleted what there was of it
    left = sorted(path.name for path in folder.iterdir())
    torch.distributed.barrier()
    trainer.save(2, {})
    trainer.shutdown()
    trainer = make_trainer(rank, world_size, config)
    found = trainer.load()
    trainer.shutdown()
    return {
        "message": message, "left": left, "found": found, "written": written,
        "planned": config.checkpoint_bytes(),
    }  # fmt: skip


def _errors(rank: int, world_size: int, root: str) -> dict[str, str]:
    """Messages of loads that must be refused."""
    empty, headless = Path(root) / "empty", Path(root) / "headless"
    empty.mkdir()
    headless.mkdir()
    (headless / "latest_checkpointed_iteration.txt").write_text("7")
    cases = {
        "nothing given": _rl_config(root, True, load=str(empty), ref_load=None, use_kl_loss=False),
        "missing": _rl_config(root, True, load=None, ref_load=str(empty)),
        "incomplete": _rl_config(root, True, load=str(headless)),
        "wider": _rl_config(root, True, hidden_size=64),
        "deeper": _rl_config(root, True, num_layers=3),
        "untied": dataclasses.replace(_rl_config(root, True), untie_embeddings_and_output_weights=True),
        "vocabulary": _rl_config(root, True, vocab_size=500),
        "head": _rl_config(root, True, load=f"{root}/untied", ref_load=None, use_kl_loss=False),
        "norms": _rl_config(root, True, load=None, qk_layernorm=False),
    }
    for name, file, size in DAMAGED:
        copy = Path(root) / name
        shutil.copytree(f"{root}/tied", copy)
        path = copy / "iter_0000002" / file
        if file == "common.pt" and not path.exists():
            path = path.with_name("metadata.json")  # megatron-core 0.19 keeps the common state among the tensors
        path.unlink() if size is None else path.write_bytes(path.read_bytes()[:size])
        cases[name] = _rl_config(root, True, load=str(copy))
    messages = {}
    for name, config in cases.items():
        trainer = make_trainer(rank, world_size, config)
        try:
            trainer.load()
            messages[name] = "accepted"
        except ValueError as error:
            messages[name] = f"{type(error).__name__}: {error}"
        trainer.shutdown()
    return messages


def _two_processes(rank: int, world_size: int, root: str) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, overrides in LAYOUTS.items():
        out[name] = _measure(rank, world_size, _rl_config(root, True, **overrides))
    for name in ("tp2_sp", "pp2"):
        out[f"untied/{name}"] = _measure(rank, world_size, _rl_config(root, False, **LAYOUTS[name]))
    out["fewer_samples_than_ranks"] = _measure(rank, world_size, _rl_config(root, True), random_samples(2, seed=5)[:1])
    steps = {"use_rollout_logprobs": False, "global_batch_size": 2}
    for name in ("dp2", "tp2_sp", "pp2"):
        config = _rl_config(root, True, **steps, **LAYOUTS[name])
        out[f"steps/{name}"] = _measure(rank, world_size, config, rollouts=2)
    out["resume"] = _resume(rank, world_size, root)
    out["full"] = _full(rank, world_size, root)
    return out


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("trainer"))


@pytest.fixture(scope="module")
def one(root: str) -> dict[str, Any]:
    return run_distributed(_one_process, 1, root)[0]


@pytest.fixture(scope="module")
def two(root: str, one: dict[str, Any]) -> list[dict[str, Any]]:
    return run_distributed(_two_processes, 2, root)


def _assert_same(got: dict[str, Any], want: dict[str, Any], *, log_probs: bool = True, atol: float = 1e-5) -> None:
    assert got["grads"].keys() == want["grads"].keys()
    assert max(float(g.abs().max()) for g in want["grads"].values()) > 0.01
    for name, grad in want["grads"].items():
        assert torch.allclose(got["grads"][name], grad, atol=atol, rtol=0), name
    for name in METRICS:
        want_metric = want["metrics"][-1][f"train/{name}"]
        assert got["metrics"][-1][f"train/{name}"] == pytest.approx(want_metric, abs=2e-5, rel=2e-6), name
    if log_probs:
        assert torch.allclose(got["log_probs"], want["log_probs"], atol=1e-5, rtol=0)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_gradient_equals_plain_float64_autograd(one: dict[str, Any], tied: bool) -> None:
    """The whole objective, sample by sample, on transformers' Qwen3 in float64, without packing or clipping code."""
    name = "tied" if tied else "untied"
    policy, reference = hf_model(one[f"{name}/policy"], tied), hf_model(one[f"{name}/start"], tied)
    samples = random_samples()
    total = torch.zeros((), dtype=torch.float64)
    diff, count = 0.0, 0
    advantages = grpo_by_hand(samples)
    learning = sum(any(sample.loss_mask) for sample in samples)
    assert learning < len(samples)  # one has nothing to learn: it counts in its group's mean, and in no divisor
    log_probs = one[f"{name}/dp1"]["log_probs"].split([sample.length for sample in samples])
    for sample, advantage, got in zip(samples, advantages, log_probs, strict=True):
        log_p = torch.log_softmax(policy(torch.tensor([sample.tokens])).logits[0] / RL["rollout_temperature"], -1)
        with torch.no_grad():
            ref = torch.log_softmax(reference(torch.tensor([sample.tokens])).logits[0] / RL["rollout_temperature"], -1)
        assert sample.rollout_log_probs is not None
        chosen = [float(log_p[t - 1, sample.tokens[t]]) for t in range(1, sample.length)]
        learned = [value * mask for value, mask in zip([0.0, *chosen], sample.loss_mask, strict=True)]
        assert got.tolist() == pytest.approx(learned, abs=1e-5)
        sum_of_tokens = torch.zeros((), dtype=torch.float64)
        for t in range(1, sample.length):
            if not sample.loss_mask[t]:
                continue
            new = log_p[t - 1, sample.tokens[t]]
            ratio = torch.exp(new - sample.rollout_log_probs[t])
            limited = torch.clamp(ratio, 1 - RL["eps_clip"], 1 + RL["eps_clip"])
            d = ref[t - 1, sample.tokens[t]] - new
            entropy = -(log_p[t - 1].exp() * log_p[t - 1]).sum()
            sum_of_tokens = sum_of_tokens - torch.minimum(ratio * advantage, limited * advantage)
            sum_of_tokens = sum_of_tokens + 0.3 * (d.exp() - d - 1).clamp(max=10) - 0.02 * entropy
            diff, count = diff + abs(float(new) - sample.rollout_log_probs[t]), count + 1
        total = total + sum_of_tokens / max(1, sum(sample.loss_mask)) / learning
    total.backward()
    metrics = one[f"{name}/dp1"]["metrics"][0]
    assert metrics["train/loss"] == pytest.approx(float(total), rel=1e-5)
    assert metrics["train/logprob_abs_diff"] == pytest.approx(diff / count, abs=1e-5)
    assert metrics["train/loss_tokens"] == count
    norm = torch.stack([p.grad.norm() for p in policy.parameters()]).norm()
    assert metrics["train/grad_norm"] == pytest.approx(float(norm), rel=1e-5)
    grads = one[f"{name}/dp1"]["grads"]
    for key, parameter in policy.named_parameters():
        assert torch.allclose(grads[key].double(), parameter.grad, atol=2e-5, rtol=1e-4), key


def grpo_by_hand(samples: list[TrainSample]) -> list[float]:
    out = []
    for sample in samples:
        rewards = [other.reward for other in samples if other.group_index == sample.group_index]
        spread = statistics.stdev(rewards) + 1e-6 if len(rewards) > 1 else 1.0
        out.append((sample.reward - statistics.fmean(rewards)) / spread)
    return out


def hf_model(state: dict[str, torch.Tensor], tied: bool) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    c = tiny_config()
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCAB_SIZE, hidden_size=c.hidden_size, intermediate_size=c.ffn_hidden_size,
            num_hidden_layers=c.num_layers, num_attention_heads=c.num_attention_heads,
            num_key_value_heads=c.num_query_groups, head_dim=c.kv_channels, rms_norm_eps=c.norm_epsilon,
            tie_word_embeddings=tied, rope_parameters={"rope_type": "default", "rope_theta": float(c.rotary_base)},
        )
    )  # fmt: skip
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected and missing == (["lm_head.weight"] if tied else [])
    return model.double()


@pytest.mark.parametrize("name", [*PACKINGS, "reversed"])
def test_gradient_does_not_depend_on_packing_or_order(one: dict[str, Any], name: str) -> None:
    _assert_same(one[name], one["tied/dp1"], log_probs=name != "reversed")


@pytest.mark.parametrize("name", list(LAYOUTS))
def test_gradient_is_the_same_in_every_layout(one: dict[str, Any], two: list[dict[str, Any]], name: str) -> None:
    _assert_same(two[0][name], one["tied/dp1"])


@pytest.mark.parametrize("name", ["tp2_sp", "pp2"])
def test_untied_gradient_is_the_same_in_every_layout(one: dict[str, Any], two: list[dict[str, Any]], name: str) -> None:
    _assert_same(two[0][f"untied/{name}"], one["untied/dp1"])


def test_metrics_and_log_probs_are_the_same_on_every_rank(two: list[dict[str, Any]]) -> None:
    for name in LAYOUTS:
        assert two[0][name]["metrics"] == two[1][name]["metrics"]
        assert torch.equal(two[0][name]["log_probs"], two[1][name]["log_probs"])


def test_a_rank_without_samples_adds_nothing(one: dict[str, Any], two: list[dict[str, Any]]) -> None:
    _assert_same(two[0]["fewer_samples_than_ranks"], one["two_samples"])


def test_per_token_mean_weights_samples_by_their_learned_tokens(one: dict[str, Any]) -> None:
    metrics = [one[name]["metrics"][0] for name in ("per_token", "tied/dp1")]
    assert metrics[0]["train/logprob_abs_diff"] == pytest.approx(metrics[1]["train/logprob_abs_diff"], abs=1e-6)
    assert abs(metrics[0]["train/loss"] - metrics[1]["train/loss"]) > 1e-3


def test_a_constant_length_scales_the_loss_and_no_mean_over_tokens(one: dict[str, Any]) -> None:
    """All tokens weigh the same, as in the token mean, but their weights are 1 / (1000 samples) each."""
    got, want = one["constant_length"]["metrics"][0], one["per_token"]["metrics"][0]
    samples = random_samples()
    scale = sum(s.num_loss_tokens for s in samples) / (1000 * sum(s.num_loss_tokens > 0 for s in samples))
    assert want["train/clip_fraction"] > 0.1
    for name in ("clip_fraction", "ppo_kl", "entropy"):
        assert got[f"train/{name}"] == pytest.approx(want[f"train/{name}"], rel=1e-5), name
    for name in ("loss", "pg_loss", "kl_loss"):
        assert got[f"train/{name}"] == pytest.approx(scale * want[f"train/{name}"], rel=1e-4), name


def test_a_batch_without_learned_tokens_has_loss_zero_and_no_gradient(one: dict[str, Any]) -> None:
    result = one["no_learned_token"]
    assert result["metrics"][0]["train/loss"] == 0.0 and result["metrics"][0]["train/grad_norm"] == 0.0
    assert all(torch.all(grad == 0) for grad in result["grads"].values())


@pytest.mark.parametrize("name", ["dp2", "tp2_sp", "pp2"])
def test_several_steps_per_rollout_agree_between_layouts(
    one: dict[str, Any], two: list[dict[str, Any]], name: str
) -> None:
    want, got = one["steps"], two[0][f"steps/{name}"]
    assert want["metrics"][0]["train/steps"] == 3.0
    assert want["metrics"][0]["train/ppo_kl"] != 0.0  # later steps are off-policy
    for step in range(2):
        for metric in METRICS:
            key = f"train/{metric}"
            assert got["metrics"][step][key] == pytest.approx(want["metrics"][step][key], abs=2e-3, rel=2e-3), key


def test_adam_equals_torch_adamw_without_decay_on_vectors(one: dict[str, Any]) -> None:
    assert max(one["adam"]["differences"]) < 1e-6


def test_clipping_bounds_the_gradient_norm(one: dict[str, Any]) -> None:
    assert max(one["adam"]["norms"]) <= 0.5 + 1e-5


@pytest.mark.parametrize("processes", [1, 2])
def test_resumed_run_is_bit_equal_to_one_never_stopped(
    one: dict[str, Any], two: list[dict[str, Any]], processes: int
) -> None:
    result = (one if processes == 1 else two[0])["resume"]
    assert result["start"] == (0, {}) and result["state"] == (3, {"epoch": 4})
    assert result["resumed"] == result["straight"]
    assert all(torch.equal(result["weights"][name], value) for name, value in result["final"].items())
    assert len({metrics["train/lr"] for metrics in result["resumed"]}) == 2


def test_a_broken_save_is_replaced_and_nothing_is_left_over(one: dict[str, Any]) -> None:
    assert one["resume"]["saved_again"] == ["iter_0000002", "iter_0000003", "latest_checkpointed_iteration.txt"]


def test_a_save_that_is_killed_while_it_deletes_leaves_a_whole_checkpoint(one: dict[str, Any]) -> None:
    assert one["killed"]["found"] == (5, {"run": 2})
    assert one["killed"]["left"] == ["iter_0000004", "iter_0000005", "latest_checkpointed_iteration.txt"]


@pytest.mark.parametrize("processes", [1, 2])
def test_a_full_disk_is_named_on_every_rank_and_costs_no_earlier_checkpoint(
    one: dict[str, Any], two: list[dict[str, Any]], processes: int
) -> None:
    for result in [one] if processes == 1 else two:
        full = result["full"]
        expected = r"the checkpoint of rollout 1 could not be written to .*GiB are free now.*--load"
        assert re.match(expected, full["message"])
        assert full["left"] == ["iter_0000000", "latest_checkpointed_iteration.txt"]
        assert full["found"] == (3, {})
        assert full["planned"] < full["written"] < 1.5 * full["planned"]  # so small that headers count


def test_a_run_whose_steps_were_all_skipped_resumes(one: dict[str, Any]) -> None:
    """Adam has no state then, although the schedule has moved on."""
    result = one["skipped"]
    assert (result["skipped"], result["next"]) == (1.0, 1)
    assert all(torch.equal(result["resumed"][name], value) for name, value in result["straight"].items())


def test_extra_state_lies_in_the_checkpoint_as_json(one: dict[str, Any], root: str) -> None:
    state = json.loads((Path(root) / "tied" / "iter_0000002" / "trainer_state.json").read_text())
    assert state["extra"] == {"epoch": 1, "order": [3, 1, 2]} and state["scheduler_steps"] == 3


@pytest.mark.parametrize("name", ["dp2", "tp2", "pp2"])
def test_optimizer_state_moves_to_another_layout(one: dict[str, Any], two: list[dict[str, Any]], name: str) -> None:
    """The step after a load at DP1 and at another layout gives the same weights, which Adam's moments decide."""
    assert two[0][name]["next"] == 3
    for key, value in one["tied/dp1"]["weights"].items():
        assert torch.allclose(two[0][name]["weights"][key], value, atol=2e-5), key


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("nothing given", "ConfigError: .*--ref-load"),
        ("missing", "CheckpointError: .*latest_checkpointed_iteration.txt"),
        ("incomplete", "CheckpointError: .*iter_0000007"),
        ("wider", "CheckpointError: .*another model|CheckpointError: .*of another"),
        ("deeper", "CheckpointError: "),
        ("untied", "CheckpointError: "),
        ("vocabulary", "CheckpointError: "),
        ("head", r"CheckpointError: .*no place for: output_layer.weight \(1\); compare the model flags"),
        ("norms", r"CheckpointError: .*no place for: decoder.layers.self_attention.k_layernorm.weight, .* \(2\)"),
        *((name, "CheckpointError: .*iter_0000002") for name, _, _ in DAMAGED),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(one: dict[str, Any], case: str, words: str) -> None:
    import re

    assert re.match(words, one["errors"][case]), one["errors"][case]
