"""Advantages: rewards of samples -> a number for every learned token.

S samples, N tokens, M learned tokens; see `segments`. Everything runs in float64 on the whole global batch, the same
on every rank and without collectives. Only learned tokens exist here: observations and prompts are no time steps,
enter no return, mean or deviation, and get the advantage 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slime_retool.algo.algorithms import Algorithm, loaded
from slime_retool.algo.segments import Segments

STD_EPSILON = 1e-6
"""Added to a standard deviation before dividing by it."""


@dataclass(frozen=True, slots=True)
class AdvantageInputs:
    """What an advantage function reads of the global batch.

    Raises ValueError for rewards that are not finite, shapes that disagree, or a KL that is missing.
    """

    segments: Segments
    rewards: Tensor  # [S]; float64 from here on
    groups: Tensor  # [S] int64; equal numbers = samples of one prompt, in any order
    kl: Tensor | None = None  # [N] per-token estimates, `kl.kl_estimate`
    kl_coef: float = 0.0
    values: Tensor | None = None  # [N], at index t the estimate at the state in which token t is chosen
    gamma: float = 1.0
    lam: float = 1.0
    normalize_std: bool = True
    args: Any = None
    """The run's `Config`, for a function of your own."""

    def __post_init__(self) -> None:
        if self.rewards.shape != (self.segments.num_samples,) or self.groups.shape != self.rewards.shape:
            raise ValueError(
                f"{self.segments.num_samples} samples came with rewards {tuple(self.rewards.shape)} and groups "
                f"{tuple(self.groups.shape)}"
            )
        object.__setattr__(self, "rewards", self.rewards.detach().double())
        if not bool(self.rewards.isfinite().all()):
            bad = (~self.rewards.isfinite()).nonzero()[:5, 0].tolist()
            raise ValueError(
                f"rewards must be finite numbers, those of samples {bad} are not; check the reward function"
            )
        if self.kl_coef != 0.0 and self.kl is None:
            raise ValueError(f"--kl-coef {self.kl_coef} needs log-probs of a reference model; give --ref-load")

    @property
    def kl_penalty(self) -> Tensor | None:
        """kl_coef * KL of each learned token, [M] float64; None without a KL in the reward."""
        if self.kl is None or self.kl_coef == 0.0:
            return None
        return self.kl_coef * self.segments.select(self.kl)

    def sample_rewards(self) -> Tensor:
        """r_i - kl_coef sum_t KL_t of each sample, [S] float64."""
        penalty = self.kl_penalty
        return self.rewards if penalty is None else self.rewards - self.segments.sum_learned(penalty)

    def token_rewards(self, rewards: Tensor) -> Tensor:
        """R_t = r_i [t is the sample's last learned token] - kl_coef KL_t, of rewards r [S]; [M] float64."""
        given = torch.where(self.segments.remaining() == 0, self.segments.learned_of(rewards), 0.0)
        penalty = self.kl_penalty
        return given if penalty is None else given - penalty


@dataclass(frozen=True, slots=True)
class Advantages:
    """Result of `compute_advantages`; 0 where nothing is learned."""

    advantages: Tensor  # [N] fp32
    returns: Tensor | None  # [N] fp32, the targets of the values; None for an algorithm that needs none


def compute_advantages(algorithm: Algorithm, inputs: AdvantageInputs, *, whiten: bool = False) -> Advantages:
    """Advantages of all learned tokens of the global batch.

    `whiten`: standardise over all learned tokens (`--normalize-advantages`), as some algorithms always do. Exactly
    equal rewards of a group, and a group of one, give exactly 0 in the group estimators; whitening then moves every
    token by the batch's mean. Raises ValueError for values that are missing, or a function's result of another shape.
    """
    segments = inputs.segments
    if algorithm.needs_critic and inputs.values is None:
        raise ValueError(f"--advantage-estimator {algorithm.name} needs values of each token")
    advantages = loaded(algorithm.advantage)(inputs)
    if advantages.shape != segments.learned.shape:
        raise ValueError(
            f"--advantage-estimator {algorithm.name} must give an advantage for each of {segments.num_learned} learned "
            f"tokens, got {tuple(advantages.shape)}; `segments.learned_of` spreads values of samples"
        )
    returns = None
    if algorithm.needs_critic:
        assert inputs.values is not None
        returns = segments.place(advantages + segments.select(inputs.values))
    if whiten or algorithm.always_whitens:
        advantages = whitened(advantages)
    return Advantages(segments.place(advantages), returns)


# One function for each estimator: `AdvantageInputs` -> [M] float64. Sums over t run over a sample's learned tokens.


def grpo(inputs: AdvantageInputs) -> Tensor:
    """(r_i - mean) / (std + 1e-6) within the group, the same for every token (https://arxiv.org/abs/2402.03300).

    Without `normalize_std` only r_i - mean (Dr. GRPO, https://arxiv.org/abs/2503.20783).
    """
    rewards = group_relative(inputs.sample_rewards(), inputs.groups, normalize_std=inputs.normalize_std)
    return inputs.segments.learned_of(rewards)


def rloo(inputs: AdvantageInputs) -> Tensor:
    """r_i - mean of the group's other rewards (https://arxiv.org/abs/2402.14740)."""
    return inputs.segments.learned_of(leave_one_out(inputs.sample_rewards(), inputs.groups))


def reinforce_plus_plus(inputs: AdvantageInputs) -> Tensor:
    """sum_{u >= t} gamma^(u - t) R_u, to be whitened (https://arxiv.org/abs/2501.03262)."""
    return _discounted(inputs, inputs.rewards)


def reinforce_plus_plus_baseline(inputs: AdvantageInputs) -> Tensor:
    """The same from r_i - mean of the group (same paper)."""
    return _discounted(inputs, group_relative(inputs.rewards, inputs.groups, normalize_std=False))


def ppo(inputs: AdvantageInputs) -> Tensor:
    """GAE(gamma, lambda) of R_t and the values (https://arxiv.org/abs/1506.02438); see `gae`."""
    assert inputs.values is not None
    segments = inputs.segments
    rewards, values = inputs.token_rewards(inputs.rewards), segments.select(inputs.values)
    return gae(rewards, values, segments.remaining(), gamma=inputs.gamma, lam=inputs.lam)


def _discounted(inputs: AdvantageInputs, rewards: Tensor) -> Tensor:
    return discounted_suffix_sums(inputs.token_rewards(rewards), inputs.segments.remaining(), inputs.gamma)


# What they are made of


def group_relative(rewards: Tensor, groups: Tensor, *, normalize_std: bool) -> Tensor:
    """(r_i - mean) / (std + 1e-6) within each group, [S] float64; std is unbiased (divided by n - 1).

    Without `normalize_std`, r_i - mean. Exactly 0 in a group whose rewards are all equal.
    """
    centred, group_of, sizes = _centred(rewards, groups)
    if not normalize_std:
        return centred
    variance = torch.zeros_like(sizes).index_add_(0, group_of, centred.square()) / (sizes - 1).clamp(min=1)
    return centred / (variance.sqrt() + STD_EPSILON)[group_of]


def leave_one_out(rewards: Tensor, groups: Tensor) -> Tensor:
    """r_i - mean of the other rewards of the group = (r_i - mean) n / (n - 1), [S] float64; 0 in a group of one."""
    centred, group_of, sizes = _centred(rewards, groups)
    return centred * (sizes / (sizes - 1).clamp(min=1))[group_of]


def _centred(rewards: Tensor, groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(rewards less their group's mean [S], a group number from 0 for each sample [S], group sizes [G]), float64."""
    _, group_of, sizes = groups.unique(return_inverse=True, return_counts=True)
    zeros = torch.zeros(len(sizes), dtype=torch.float64, device=rewards.device)
    means = zeros.index_add(0, group_of, rewards) / sizes
    lowest = zeros.scatter_reduce(0, group_of, rewards, "amin", include_self=False)
    highest = zeros.scatter_reduce(0, group_of, rewards, "amax", include_self=False)
    # The mean of equal numbers may differ from them in the last bit, and a tiny deviation would blow that up.
    spread = (highest > lowest)[group_of]
    return torch.where(spread, rewards - means[group_of], 0.0), group_of, sizes.double()


def discounted_suffix_sums(values: Tensor, remaining: Tensor, discount: float) -> Tensor:
    """sum_{k >= 0} discount^k values[t + k] within each sample, [M] float64.

    `remaining` [M] is how many entries of the same sample follow. A scan by doubling: after the pass with step s an
    entry holds the sum of its next 2s terms, so that the longest sample of R entries takes log2(R) passes.
    """
    sums = values.double().clone()
    longest = int(remaining.max()) if len(remaining) else 0
    step = 1
    while step <= longest and discount**step != 0.0:
        later = torch.where(remaining[:-step] >= step, sums[step:], 0.0)
        sums[:-step] += later.mul_(discount**step)
        step *= 2
    return sums


def gae(rewards: Tensor, values: Tensor, remaining: Tensor, *, gamma: float, lam: float) -> Tensor:
    """Generalised advantage estimation over learned tokens, [M] float64 (https://arxiv.org/abs/1506.02438, eq. 16).

    delta_t = r_t + gamma V_{t+1} - V_t; A_t = sum_k (gamma lam)^k delta_{t+k}. t + 1 is the sample's next learned
    token, across any observation between them; after the last one V is 0.
    """
    following = torch.zeros_like(values)
    following[:-1] = torch.where(remaining[:-1] > 0, values[1:], 0.0)
    return discounted_suffix_sums(rewards + gamma * following - values, remaining, gamma * lam)


def whitened(values: Tensor) -> Tensor:
    """(x - mean) / (std + 1e-6) over all entries [M] of the global batch, std unbiased; exactly 0 if all are equal."""
    if len(values) == 0 or bool(values.min() == values.max()):
        return torch.zeros_like(values)
    return (values - values.mean()) / (values.std() + STD_EPSILON)


def explained_variance(segments: Segments, values: Tensor, returns: Tensor) -> float:
    """1 - Var(returns - values) / Var(returns) over learned tokens: 1 = perfect values; 0 if returns do not vary."""
    target = segments.select(returns)
    if len(target) < 2 or bool(target.min() == target.max()):
        return 0.0
    return float(1 - (target - segments.select(values)).var() / target.var())
