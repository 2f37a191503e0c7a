"""PPO with its critic, GSPO and CISPO in every layout; importance weights, distillation, warm-up, resuming.

Three groups of processes (1, 2 and 4) do all the work; tests look at what they returned.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from algo_reference import clipped_surrogate
from dist_utils import run_distributed
from test_trainer_distributed import grpo_by_hand, hf_model
from trainer_utils import critic_gradients, gradients, make_trainer, random_samples, sharpen, tiny_config, weights

from slime_retool.trainer.gather import hf_named_tensors
from slime_retool.types import RolloutBatch, TrainSample

TEMPERATURE, GAMMA, LAM, KL_COEF, CLIP = 0.8, 0.95, 0.9, 0.05, 0.2
COMMON = {"rollout_temperature": TEMPERATURE, "eps_clip": CLIP}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "ppo": {
        "advantage_estimator": "ppo", "gamma": GAMMA, "lambd": LAM, "kl_coef": KL_COEF, "use_tis": True,
        "calculate_per_token_loss": True, "tis_clip": 1.3, "tis_clip_low": 0.5, "value_clip": 0.0,
        "normalize_advantages": True,
    },
    "gspo": {"advantage_estimator": "gspo", "use_rollout_logprobs": True, "eps_clip": 0.05},
    "cispo": {"advantage_estimator": "cispo", "use_rollout_logprobs": True, "loss_constant_length": 7},
}  # fmt: skip
TP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    1: {"one_each": {"use_dynamic_batch_size": False}, "all_in_one": {"max_tokens_per_gpu": 1000}},
    2: {"dp2": {}, "tp2": TP2, "tp2_sp": {**TP2, "sequence_parallel": True}, "pp2": PP2},
    4: {
        "tp2_dp2_one_each": {**TP2, "use_dynamic_batch_size": False},
        "tp2_sp_pp2": {**TP2, **PP2, "sequence_parallel": True},
    },
}
CASES = [(algorithm, layout) for algorithm in ALGORITHMS for group in LAYOUTS.values() for layout in group]


def _config(root: str, algorithm: str, **overrides: Any) -> Any:
    folders = {"ref_load": f"{root}/ref", "load": f"{root}/actor"}
    if algorithm == "ppo":
        folders["critic_load"] = f"{root}/critic"
    return tiny_config(**{**COMMON, **ALGORITHMS[algorithm], **folders, **overrides})


def near_samples(seed: int = 0) -> list[TrainSample]:
    """Samples whose engine log-probs are plausible for the tiny model, so that ratios are near 1 or clipped."""
    generator = torch.Generator().manual_seed(seed)
    samples = random_samples(seed=seed)
    for sample in samples:
        noise = torch.rand(sample.length, generator=generator) * 0.6
        sample.rollout_log_probs = [-4.5 + float(n) if m else 0.0 for n, m in zip(noise, sample.loss_mask, strict=True)]
        sample.columns["teacher_log_probs"] = [-float(n) * 9 for n in noise]
    return [dataclasses.replace(sample) for sample in samples]


def _measure(rank: int, world_size: int, config: Any) -> dict[str, Any]:
    trainer = make_trainer(rank, world_size, config)
    rollout_id, _ = trainer.load()
    batch = RolloutBatch(near_samples())
    out: dict[str, Any] = {"log_probs": trainer.log_probs(batch.samples), "next": rollout_id}
    if config.uses_critic:
        out["values"] = trainer.values(batch)
    metrics = trainer.train(batch, rollout_id)
    out["metrics"] = {name: value for name, value in metrics.items() if not name.startswith(("perf/", "memory/"))}
    out["grads"] = {"actor": gradients(trainer)} | ({"critic": critic_gradients(trainer)} if config.uses_critic else {})
    trainer.shutdown()
    return out


def _one_process(rank: int, world_size: int, root: str) -> dict[str, Any]:
    out: dict[str, Any] = {}
    config = tiny_config(**COMMON, loss_type="sft_loss", save=f"{root}/ref")
    trainer = make_trainer(rank, world_size, config)
    sharpen(trainer)
    with torch.no_grad():
        trainer.module.embedding.word_embeddings.weight.mul_(0.5)
    trainer.actor.optimizer.reload_model_params()
    trainer.save(0, {})
    out["ref"] = weights(trainer)
    trainer.shutdown()
    # An actor a step away from the reference, and a critic with something to say.
    start = {"load": None, "critic_load": None, "save": f"{root}/actor", "critic_save": f"{root}/critic"}
    trainer = make_trainer(rank, world_size, _config(root, "ppo", **start))
    out["fresh"] = trainer.load()
    out["fresh values"] = trainer.values(RolloutBatch(near_samples()))
    out["first"] = trainer.train(RolloutBatch(near_samples(seed=3)), 0)
    out["second"] = trainer.train(RolloutBatch(near_samples(seed=3)), 1)
    trainer.save(1, {"a": 1})
    out["actor"], out["critic"] = weights(trainer), weights_of_critic(trainer)
    named = hf_named_tensors(trainer.critic.module, trainer.critic.config)
    out["critic trunk"] = {name: tensor.clone() for name, tensor in named if name != "lm_head.weight"}
    trainer.shutdown()
    for algorithm in ALGORITHMS:
        out[algorithm] = _measure(rank, world_size, _config(root, algorithm))
    out |= _layouts(rank, world_size, root)
    steps = {"global_batch_size": 2}
    out["old policy"] = _measure(rank, world_size, _config(root, "gspo", use_rollout_logprobs=False, **steps))
    out["distill"] = _measure(
        rank, world_size, tiny_config(**COMMON, load=f"{root}/actor", distill_coef=0.7, eps_clip_c=3.0)
    )
    out["resume"] = _resume(rank, world_size, root)
    out["lost"] = _lost_critic(rank, world_size, root)
    out["warm-up"] = _warm_up(rank, world_size, root)
    out["apart"] = _apart(rank, world_size, root)
    return out


def weights_of_critic(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer.critic.module.named_parameters()}


def _layouts(rank: int, world_size: int, root: str) -> dict[str, Any]:
    return {
        f"{algorithm}/{layout}": _measure(rank, world_size, _config(root, algorithm, **overrides))
        for layout, overrides in LAYOUTS[world_size].items()
        for algorithm in ALGORITHMS
    }


def _resume(rank: int, world_size: int, root: str) -> dict[str, Any]:
    """Four rollouts in one go; and two, a save, a critic's save whose actor's never came, a new trainer, two more.

    The critic begins as that of another run, which has a checkpoint of the same rollout.
    """
    folder = f"{root}/resume{world_size}"
    config = _config(
        root, "ppo", load=folder, save=folder, critic_load=f"{root}/critic", critic_save=f"{folder}/critic",
        critic_lr=3e-3, critic_lr_warmup_iters=3, global_batch_size=3, value_clip=0.1,
    )  # fmt: skip
    batches = [RolloutBatch(near_samples(seed=20 + i)) for i in range(4)]

    def run(trainer: Any, first: int) -> list[dict[str, float]]:
        rows = [trainer.train(batch, first + i) for i, batch in enumerate(batches[first:])]
        return [
            {name: value for name, value in row.items() if not name.startswith(("perf/", "memory/"))} for row in rows
        ]

    trainer = make_trainer(rank, world_size, config)
    start = trainer.load()
    for i in range(2):
        trainer.train(batches[i], i)
    trainer.save(1, {"seen": 2})
    straight = run(trainer, 2)
    save_critic(trainer, 2)  # what a kill between the critic's save and the actor's leaves behind
    final = weights(trainer), weights_of_critic(trainer)
    trainer.shutdown()
    trainer = make_trainer(rank, world_size, config)
    state = trainer.load()
    resumed = run(trainer, 2)
    got = weights(trainer), weights_of_critic(trainer)
    trainer.shutdown()
    return {"start": start, "state": state, "straight": straight, "resumed": resumed, "final": final, "got": got}


def save_critic(trainer: Any, rollout_id: int) -> None:
    staged = trainer.critic.stage(rollout_id, {}, trainer.writer.copies)
    trainer.writer.write([staged], background=False)


def _lost_critic(rank: int, world_size: int, root: str) -> str:
    """The actor resumes from rollout 1, the critic's folder has only rollout 9."""
    trainer = make_trainer(rank, world_size, _config(root, "ppo", critic_save=f"{root}/other", save=f"{root}/unused"))
    trainer.load()
    save_critic(trainer, 9)
    trainer.shutdown()
    trainer = make_trainer(rank, world_size, _config(root, "ppo", critic_load=f"{root}/other"))
    try:
        trainer.load()
        return "accepted"
    except ValueError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        trainer.shutdown()


def _warm_up(rank: int, world_size: int, root: str) -> dict[str, Any]:
    trainer = make_trainer(rank, world_size, _config(root, "ppo", num_critic_only_steps=3))
    trainer.load()
    before = weights(trainer), weights_of_critic(trainer)
    metrics = trainer.train(RolloutBatch(near_samples()), 2)
    during = weights(trainer), weights_of_critic(trainer)
    trainer.train(RolloutBatch(near_samples()), 3)
    after = weights(trainer), weights_of_critic(trainer)
    trainer.shutdown()
    return {"before": before, "during": during, "after": after, "metrics": metrics}


def _apart(rank: int, world_size: int, root: str) -> dict[str, Any]:
    """Actor and critic as trainers of their own, values and returns carried by hand."""
    config, batch = _config(root, "ppo"), RolloutBatch(near_samples())
    critic = make_trainer(rank, world_size, config, roles="critic")
    started = critic.load()
    values = critic.values(batch)
    critic.shutdown()
    actor = make_trainer(rank, world_size, config, roles="actor")
    actor.load()
    returns = actor.prepare(batch, 2, values)
    metrics = actor.optimize(2)
    grads = {"actor": gradients(actor)}
    actor.shutdown()
    critic = make_trainer(rank, world_size, config, roles="critic")
    critic.load()
    metrics |= critic.train_critic(batch, 2, values, returns)
    grads["critic"] = critic_gradients(critic)
    critic.shutdown()
    metrics = {name: value for name, value in metrics.items() if not name.startswith(("perf/", "memory/"))}
    return {"metrics": metrics, "grads": grads, "started": started}


def _several(rank: int, world_size: int, root: str) -> dict[str, Any]:
    out = _layouts(rank, world_size, root)
    if world_size == 2:
        out["resume"] = _resume(rank, world_size, root)
    return out


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("roles"))


@pytest.fixture(scope="module")
def results(root: str) -> dict[int, list[dict[str, Any]]]:
    """By number of processes: every rank's results."""
    return {n: run_distributed(_one_process if n == 1 else _several, n, root) for n in LAYOUTS}


@pytest.fixture(scope="module")
def one(results: dict[int, list[dict[str, Any]]]) -> dict[str, Any]:
    return results[1][0]


# Against float64 autograd on transformers' model


class Reference:
    """Actor, reference model and critic in float64, one sample at a time."""

    def __init__(self, one: dict[str, Any]) -> None:
        self.samples = near_samples()
        self.actor, self.ref = hf_model(one["actor"], tied=True), hf_model(one["ref"], tied=True)
        self.log_probs = [self._log_probs(self.actor, sample) for sample in self.samples]

    @staticmethod
    def _log_probs(model: Any, sample: TrainSample) -> torch.Tensor:
        """Of the learned tokens."""
        logits = model(torch.tensor([list(sample.tokens)])).logits[0] / TEMPERATURE
        return torch.stack([torch.log_softmax(logits[t - 1], -1)[sample.tokens[t]] for t in learned(sample)] or [ZERO])

    def kl(self, i: int) -> list[float]:
        with torch.no_grad():
            other = self._log_probs(self.ref, self.samples[i])
        return (self.log_probs[i].detach() - other).tolist()

    def gradients(self, loss: torch.Tensor) -> dict[str, torch.Tensor]:
        loss.backward()
        return {name: p.grad for name, p in self.actor.named_parameters()}


ZERO = torch.zeros((), dtype=torch.float64)


def learned(sample: TrainSample) -> list[int]:
    return [t for t, m in enumerate(sample.loss_mask) if m]


def gae_by_hand(rewards: list[float], values: list[float]) -> list[float]:
    out, following, running = [], 0.0, 0.0
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        running = reward + GAMMA * following - value + GAMMA * LAM * running
        following = value
        out.append(running)
    return out[::-1]


def _assert_grads(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert max(float(g.abs().max()) for g in want.values()) > 1e-3
    for name, grad in want.items():
        assert torch.allclose(got[name].double(), grad, atol=1e-5, rtol=1e-4), name


def test_ppo_equals_float64_autograd(one: dict[str, Any]) -> None:
    """Actor's and critic's gradients: KL in the reward, GAE over learned tokens, whitening, truncated weights."""
    reference = Reference(one)
    got, samples = one["ppo"], reference.samples
    values = got["values"].split([sample.length for sample in samples])
    total = sum(len(learned(sample)) for sample in samples)
    advantages: list[list[float]] = []
    returns: list[list[float]] = []
    for i, sample in enumerate(samples):
        chosen = [float(values[i][t]) for t in learned(sample)]
        rewards = [-KL_COEF * kl for kl in reference.kl(i)][: len(chosen)]
        if rewards:
            rewards[-1] += sample.reward
        advantages.append(gae_by_hand(rewards, chosen))
        returns.append([a + v for a, v in zip(advantages[i], chosen, strict=True)])
    everything = [a for row in advantages for a in row]
    mean, std = statistics.fmean(everything), statistics.stdev(everything)
    loss = ZERO
    for i, sample in enumerate(samples):
        for k, t in enumerate(learned(sample)):
            new = reference.log_probs[i][k]
            assert sample.rollout_log_probs is not None
            weight = min(max(math.exp(float(new) - sample.rollout_log_probs[t]), 0.5), 1.3)
            loss = loss - weight * (advantages[i][k] - mean) / (std + 1e-6) * torch.exp(new - new.detach()) / total
    _assert_grads(got["grads"]["actor"], reference.gradients(loss))
    assert got["metrics"]["train/loss"] == pytest.approx(float(loss), abs=1e-5)

    head = one["critic"]["output_layer.weight"].double().requires_grad_()
    trunk = hf_model(critic_state(one), tied=False)
    value_loss = ZERO
    residuals: list[float] = []
    for i, sample in enumerate(samples):
        hidden = trunk.model(torch.tensor([list(sample.tokens)])).last_hidden_state[0]
        for k, t in enumerate(learned(sample)):
            value = (hidden[t - 1] * head[0]).sum()
            assert float(value) == pytest.approx(float(values[i][t]), abs=1e-5)
            residuals.append(returns[i][k] - float(value))
            value_loss = value_loss + (value - returns[i][k]).square() / 2 / total
    value_loss.backward()
    assert head.grad is not None
    want = {name: p.grad for name, p in trunk.named_parameters() if p.grad is not None} | {"head": head.grad}
    _assert_grads(got["grads"]["critic"], want)
    metrics = got["metrics"]
    assert metrics["critic/value_loss"] == pytest.approx(float(value_loss), abs=1e-5)
    flat = [r for row in returns for r in row]
    explained = 1 - statistics.variance(residuals) / statistics.variance(flat)
    assert metrics["critic/explained_variance"] == pytest.approx(explained, abs=1e-4)
    assert metrics["critic/return_mean"] == pytest.approx(statistics.fmean(flat), abs=1e-5)


def critic_state(one: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {**one["critic trunk"], "lm_head.weight": one["actor"]["model.embed_tokens.weight"]}


def test_gspo_equals_float64_autograd(one: dict[str, Any]) -> None:
    """The sequence form of the paper: one ratio per sample, its geometric mean."""
    reference = Reference(one)
    samples, loss = reference.samples, ZERO
    advantages = grpo_by_hand(samples)
    taught = [i for i, sample in enumerate(samples) if learned(sample)]
    clipped = 0
    for i in taught:
        assert samples[i].rollout_log_probs is not None
        old = torch.tensor([samples[i].rollout_log_probs[t] for t in learned(samples[i])], dtype=torch.float64)
        ratio = (reference.log_probs[i] - old).mean().exp()
        bounded = ratio.clamp(0.95, 1.05)
        value = torch.minimum(ratio * advantages[i], bounded * advantages[i])
        assert float(-value) == pytest.approx(clipped_surrogate(float(ratio), advantages[i], 0.05, 0.05, None))
        clipped += int(float(value) != pytest.approx(float(ratio * advantages[i])))
        loss = loss - value / len(taught)
    assert 0 < clipped < len(taught)
    assert one["gspo"]["metrics"]["train/loss"] == pytest.approx(float(loss), abs=1e-5)
    _assert_grads(one["gspo"]["grads"]["actor"], reference.gradients(loss))


def test_distillation_adds_the_gradient_of_the_reverse_kl(one: dict[str, Any]) -> None:
    reference = Reference(one)
    samples, loss = reference.samples, ZERO
    advantages = grpo_by_hand(samples)
    taught = [i for i, sample in enumerate(samples) if learned(sample)]
    for i in taught:
        given = samples[i].columns["teacher_log_probs"]
        teacher = torch.tensor([given[t] for t in learned(samples[i])], dtype=torch.float64)
        new = reference.log_probs[i]
        terms = 0.7 * (new - teacher).detach() * new - advantages[i] * torch.exp(new - new.detach())
        loss = loss + terms.mean() / len(taught)
    _assert_grads(one["distill"]["grads"]["actor"], reference.gradients(loss))


# Layouts


@pytest.mark.parametrize(("algorithm", "layout"), CASES)
def test_the_step_is_the_same_in_every_layout(
    results: dict[int, list[dict[str, Any]]], algorithm: str, layout: str
) -> None:
    world = next(n for n, layouts in LAYOUTS.items() if layout in layouts)
    got, want = results[world][0][f"{algorithm}/{layout}"], results[1][0][algorithm]
    assert torch.allclose(got["log_probs"], want["log_probs"], atol=1e-5, rtol=0)
    if algorithm == "ppo":
        assert torch.allclose(got["values"], want["values"], atol=1e-5, rtol=0)
    for role, grads in want["grads"].items():
        assert got["grads"][role].keys() == grads.keys()
        assert max(float(g.abs().max()) for g in grads.values()) > 1e-3
        for name, grad in grads.items():
            assert torch.allclose(got["grads"][role][name], grad, atol=1e-5, rtol=0), (role, name)
    for name, value in want["metrics"].items():
        if not name.endswith("/micro_batches"):
            assert got["metrics"][name] == pytest.approx(value, abs=2e-5, rel=1e-5), name


def test_every_rank_reports_the_same(results: dict[int, list[dict[str, Any]]]) -> None:
    for world in (2, 4):
        for other in results[world][1:]:
            for case in (f"{algorithm}/{layout}" for algorithm in ALGORITHMS for layout in LAYOUTS[world]):
                assert other[case]["metrics"] == results[world][0][case]["metrics"]


# The course of a run


def test_a_new_critic_says_zero_and_learns(one: dict[str, Any]) -> None:
    assert one["fresh"] == (0, {}) and torch.all(one["fresh values"] == 0)
    assert one["first"]["critic/explained_variance"] == pytest.approx(0.0, abs=1e-6)
    assert one["second"]["critic/value_loss"] < one["first"]["critic/value_loss"]
    assert float(one["ppo"]["values"].abs().max()) > 0.01


@pytest.mark.parametrize("processes", [1, 2])
def test_a_resumed_run_of_actor_and_critic_is_bit_equal(
    results: dict[int, list[dict[str, Any]]], processes: int
) -> None:
    result = results[processes][0]["resume"]
    assert result["start"] == (0, {}) and result["state"] == (2, {"seen": 2})
    assert result["resumed"] == result["straight"]
    for got, want in zip(result["got"], result["final"], strict=True):
        assert all(torch.equal(got[name], value) for name, value in want.items())


def test_the_critic_has_its_own_learning_rate_and_warm_up(one: dict[str, Any]) -> None:
    # Steps 5 and 7 (two per rollout, from 0): the actor's rate is constant, the critic's warm-up of 3 is over.
    assert [row["train/lr"] for row in one["resume"]["straight"]] == [1e-2, 1e-2]
    assert [row["critic/lr"] for row in one["resume"]["straight"]] == [3e-3, 3e-3]


def test_an_actor_without_its_critic_is_not_resumed(one: dict[str, Any]) -> None:
    assert one["lost"].startswith("CheckpointError: the actor goes on from rollout 1"), one["lost"]


def test_only_the_critic_moves_while_it_warms_up(one: dict[str, Any]) -> None:
    result = one["warm-up"]
    same = [
        [all(torch.equal(b[name], value) for name, value in a.items()) for a, b in zip(old, new, strict=True)]
        for old, new in ((result["before"], result["during"]), (result["during"], result["after"]))
    ]
    assert same == [[True, False], [False, False]]
    assert "train/loss" not in result["metrics"] and "critic/loss" in result["metrics"]


def test_actor_and_critic_apart_take_the_same_step_as_together(one: dict[str, Any]) -> None:
    assert one["apart"]["started"][0] == 2
    assert one["apart"]["metrics"] == one["ppo"]["metrics"]
    for role, grads in one["ppo"]["grads"].items():
        assert all(torch.equal(one["apart"]["grads"][role][name], grad) for name, grad in grads.items())


def test_mismatch_is_measured_under_the_weights_that_sampled(one: dict[str, Any]) -> None:
    """With several steps before the first one, not averaged over weights that the engine never had."""
    got = one["old policy"]
    samples = near_samples()
    log_probs = got["log_probs"].split([sample.length for sample in samples])
    turns: dict[int, list[float]] = {}
    for sample, row in zip(samples, log_probs, strict=True):
        turn = -1
        for t in range(1, sample.length):
            if sample.loss_mask[t]:
                turn += 1 - sample.loss_mask[t - 1]
                assert sample.rollout_log_probs is not None
                turns.setdefault(turn, []).append(abs(float(row[t]) - sample.rollout_log_probs[t]))
    metrics = got["metrics"]
    assert metrics["train/steps"] == 3
    assert metrics["train/logprob_abs_diff"] == pytest.approx(statistics.fmean(sum(turns.values(), [])), abs=1e-5)
    for turn, differences in turns.items():
        assert metrics[f"mismatch/turn_{turn}/abs_diff"] == pytest.approx(statistics.fmean(differences), abs=1e-5)


def test_checkpoints_of_actor_and_critic_are_folders_of_their_own(one: dict[str, Any], root: str) -> None:
    assert (Path(root) / "actor" / "iter_0000001").is_dir() and (Path(root) / "critic" / "iter_0000001").is_dir()
