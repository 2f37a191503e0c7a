"""The formulas of slime_retool.algo once more: float64, plain loops over learned tokens, nothing shared with it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from slime_retool.algo.segments import Segments

Array = np.ndarray
POISON = (math.nan, math.inf, -math.inf, 1e30)


@dataclass
class Batch:
    """Samples as lists of per-token arrays; what lies under mask 0 is poison."""

    masks: list[Array]  # S of [T] bool
    rewards: Array  # [S]
    groups: list[int]  # [S]
    fields: dict[str, list[Array]]
    """Per-token float64 values by name: log_probs, old, ref, values, old_values, returns, advantages."""

    @property
    def segments(self) -> Segments:
        return Segments.of([mask.astype(int).tolist() for mask in self.masks])

    @property
    def mask(self) -> torch.Tensor:
        return self.segments.mask

    def flat(self, name: str) -> torch.Tensor:
        return torch.tensor(np.concatenate(self.fields[name]), dtype=torch.float64)

    def learned(self, name: str, sample: int) -> list[float]:
        """A field's values at a sample's learned tokens."""
        return [float(v) for v, m in zip(self.fields[name][sample], self.masks[sample], strict=True) if m]

    def weights(self, *, per_token: bool) -> list[Array]:
        """Token weights that average over the batch's learned tokens, or over samples and then their tokens."""
        total = sum(int(mask.sum()) for mask in self.masks)
        return [
            mask / float(total if per_token else mask.sum() * len(self.masks)) if mask.any() else np.zeros(len(mask))
            for mask in self.masks
        ]

    def reordered(self, order: list[int]) -> Batch:
        return Batch(
            [self.masks[i] for i in order],
            self.rewards[order],
            [self.groups[i] for i in order],
            {name: [rows[i] for i in order] for name, rows in self.fields.items()},
        )

    def padded(self, rng: np.random.Generator) -> Batch:
        """The same learned tokens with masked ones put in anywhere, and a sample of its own without learned tokens."""
        masks: list[Array] = []
        fields: dict[str, list[Array]] = {name: [] for name in self.fields}
        for i, mask in enumerate(self.masks):
            at = np.sort(rng.integers(0, len(mask) + 1, rng.integers(0, 5)))
            masks.append(np.insert(mask, at, False))
            for name, rows in self.fields.items():
                fields[name].append(np.insert(rows[i], at, rng.choice(POISON, len(at))))
        masks.append(np.zeros(3, dtype=bool))
        for name in fields:
            fields[name].append(np.full(3, math.nan))
        return Batch(masks, np.append(self.rewards, 5.0), [*self.groups, 10**6], fields)


def random_batch(seed: int) -> Batch:
    """1 to 9 samples of 1 to 14 tokens in groups of any size, some without learned tokens."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 10))
    masks = []
    for _ in range(count):
        mask = rng.random(rng.integers(1, 15)) < rng.choice([0.0, 0.5, 0.8, 1.0])
        mask[0] = False
        masks.append(mask)
    # Few distinct rewards, so that groups of equal ones come up.
    rewards = rng.choice([0.0, 1.0, 0.1, -1.0], count) if rng.random() < 0.7 else rng.standard_normal(count)
    fields: dict[str, list[Array]] = {}
    for name in ("log_probs", "old", "ref", "values", "old_values", "returns", "advantages"):
        fields[name] = []
        for mask in masks:
            row = rng.standard_normal(len(mask))
            if name in ("log_probs", "old", "ref"):
                row = -np.abs(row)
            fields[name].append(np.where(mask, row, rng.choice(POISON, len(mask))))
    return Batch(masks, rewards, rng.choice([3, 900, -5], count).tolist(), fields)


# Advantages


def k1(batch: Batch, i: int) -> list[float]:
    """The per-token KL that the tests put into the reward: log_probs - ref."""
    return [n - r for n, r in zip(batch.learned("log_probs", i), batch.learned("ref", i), strict=True)]


def reference_advantages(
    estimator: str, batch: Batch, *, kl_coef: float, gamma: float, lam: float, normalize_std: bool, whiten: bool
) -> tuple[list[list[float]], list[list[float]]]:
    """(advantages, returns) of each sample's learned tokens; returns mean something for ppo only."""
    samples = range(len(batch.masks))
    rewards = [float(r) for r in batch.rewards]
    lengths = [int(mask.sum()) for mask in batch.masks]
    if estimator in ("grpo", "gspo", "cispo", "rloo"):
        rewards = [r - kl_coef * math.fsum(k1(batch, i)) for i, r in enumerate(rewards)]
    if estimator not in ("ppo", "reinforce_plus_plus"):
        rewards = [_group_score(estimator, rewards, batch.groups, i, normalize_std) for i in samples]
    advantages: list[list[float]] = []
    returns: list[list[float]] = []
    for i in samples:
        if estimator in ("grpo", "gspo", "cispo", "rloo"):
            advantages.append([rewards[i]] * lengths[i])
            continue
        stream = [-kl_coef * k for k in k1(batch, i)]
        if stream:
            stream[-1] += rewards[i]
        if estimator == "ppo":
            values = [*batch.learned("values", i), 0.0]
            running, out = 0.0, []
            for t in reversed(range(lengths[i])):
                running = stream[t] + gamma * values[t + 1] - values[t] + gamma * lam * running
                out.append(running)
            advantages.append(out[::-1])
            returns.append([a + v for a, v in zip(out[::-1], values, strict=False)])
        else:
            advantages.append(
                [math.fsum(gamma ** (u - t) * stream[u] for u in range(t, lengths[i])) for t in range(lengths[i])]
            )
    if whiten or estimator.startswith("reinforce"):
        everything = [a for row in advantages for a in row]
        if len(set(everything)) > 1:
            mean, std = np.mean(everything), np.std(everything, ddof=1)
            advantages = [[(a - mean) / (std + 1e-6) for a in row] for row in advantages]
        else:
            advantages = [[0.0] * len(row) for row in advantages]
    return advantages, returns


def _group_score(estimator: str, rewards: list[float], groups: list[int], i: int, normalize_std: bool) -> float:
    own = [r for r, g in zip(rewards, groups, strict=True) if g == groups[i]]
    if len(set(own)) == 1:
        return 0.0
    if estimator == "rloo":
        others = [r for j, r in enumerate(rewards) if groups[j] == groups[i] and j != i]
        return rewards[i] - math.fsum(others) / len(others)
    centred = rewards[i] - math.fsum(own) / len(own)
    if estimator == "reinforce_plus_plus_baseline" or not normalize_std:
        return centred
    return centred / (float(np.std(own, ddof=1)) + 1e-6)


# KL and losses, one token at a time


def kl_value(kind: str, new: float, ref: float) -> float:
    d = ref - new
    if kind == "k1":
        return new - ref
    if kind == "k2":
        return 0.5 * d * d
    k3 = math.exp(d) - 1 - d
    return min(k3, 10.0) if kind == "low_var_kl" else k3


def clipped_surrogate(ratio: float, advantage: float, low: float, high: float, c: float | None) -> float:
    objective = min(advantage * ratio, advantage * min(max(ratio, 1 - low), 1 + high))
    if c is not None and advantage < 0:
        objective = max(objective, c * advantage)
    return -objective


def numeric_gradient(function: Callable[[list[Array]], float], rows: list[Array], masks: list[Array]) -> list[Array]:
    """Central differences of `function` at every learned token; 0 at the others."""
    step = 1e-6
    out = [np.zeros(len(row)) for row in rows]
    for i, mask in enumerate(masks):
        for t in np.flatnonzero(mask):
            value = rows[i][t]
            sides = []
            for shift in (step, -step):
                rows[i][t] = value + shift
                sides.append(function(rows))
            rows[i][t] = value
            out[i][t] = (sides[0] - sides[1]) / (2 * step)
    return out
