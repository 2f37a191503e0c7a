"""Advantages: rewards of samples -> a number for every learned token.

S samples, N tokens, M learned tokens; see `segments`. Everything runs in float64 on the whole global batch, the same
on every rank and without collectives. Only learned tokens exist here: observations and prompts are no time steps,
enter no return, mean or deviation, and get the advantage 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from slime_retool.algo.segments import Segments

STD_EPSILON = 1e-6
"""Added to a standard deviation before dividing by it."""

GROUP_RELATIVE = ("grpo", "gspo", "cispo")
"""Estimators that share GRPO's advantages; their losses differ."""

ESTIMATORS = (*GROUP_RELATIVE, "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo")


@dataclass(frozen=True, slots=True)
class Advantages:
    """Result of `compute_advantages`; 0 where nothing is learned."""

    advantages: Tensor  # [N] fp32
    returns: Tensor | None  # [N] fp32, the critic's targets; PPO only


def compute_advantages(
    estimator: str,
    segments: Segments,
    rewards: Tensor,  # [S]
    groups: Tensor,  # [S] int64; equal numbers = samples of one prompt, in any order
    *,
    kl: Tensor | None = None,  # [N] per-token estimates, `kl.kl_estimate`
    kl_coef: float = 0.0,
    values: Tensor | None = None,  # [N]
    gamma: float = 1.0,
    lam: float = 1.0,
    normalize_std: bool = True,
    whiten: bool = False,
) -> Advantages:
    """Advantages of all learned tokens of the global batch.

    r_i is sample i's reward, KL_i the sum of its per-token KL, K_t the KL of token t. Sums over t run over a sample's
    learned tokens only.

    - grpo, gspo, cispo: A = (r_i - mean) / (std + 1e-6) within the group, the same for every token
      (https://arxiv.org/abs/2402.03300); without `normalize_std` only r_i - mean (Dr. GRPO,
      https://arxiv.org/abs/2503.20783).
    - rloo: A = r_i - mean of the group's other rewards (https://arxiv.org/abs/2402.14740).
    - reinforce_plus_plus: A_t = sum_{u >= t} gamma^(u - t) (r_i [u last] - kl_coef K_u), whitened
      (https://arxiv.org/abs/2501.03262).
    - reinforce_plus_plus_baseline: the same from r_i - mean of the group; whitened (same paper).
    - ppo: GAE(gamma, lam) of the same token rewards, https://arxiv.org/abs/1506.02438; see `gae`.

    The group estimators and rloo take r_i - kl_coef KL_i as the reward. Exactly equal rewards of a group, and a group
    of one, give exactly 0 (before whitening, which moves every token by the batch's mean).

    Args:
        values: the critic's estimate at the state in which token t is chosen, at index t; ppo needs it.
        whiten: standardise over all learned tokens (`--normalize-advantages`). The REINFORCE++ estimators always do.

    Raises ValueError for an unknown estimator, rewards that are not finite, shapes that disagree, or missing input.
    """
    if estimator not in ESTIMATORS:
        raise ValueError(f"unknown --advantage-estimator {estimator!r}; it is one of {', '.join(ESTIMATORS)}")
    if rewards.shape != (segments.num_samples,) or groups.shape != rewards.shape:
        raise ValueError(
            f"{segments.num_samples} samples came with rewards {tuple(rewards.shape)} and groups {tuple(groups.shape)}"
        )
    rewards = rewards.detach().double()
    if not bool(rewards.isfinite().all()):
        bad = (~rewards.isfinite()).nonzero()[:5, 0].tolist()
        raise ValueError(f"rewards must be finite numbers, those of samples {bad} are not; check the reward function")
    if kl_coef != 0.0 and kl is None:
        raise ValueError(f"--kl-coef {kl_coef} needs log-probs of a reference model; give --ref-load")
    penalty = kl_coef * segments.select(kl) if kl is not None and kl_coef != 0.0 else None  # [M]

    if estimator in GROUP_RELATIVE or estimator == "rloo":
        if penalty is not None:
            rewards = rewards - segments.sum_learned(penalty)
        if estimator == "rloo":
            per_sample = leave_one_out(rewards, groups)
        else:
            per_sample = group_relative(rewards, groups, normalize_std=normalize_std)
        advantages = per_sample[segments.sample_of[segments.learned]]
        return Advantages(segments.place(whitened(advantages) if whiten else advantages), None)

    if estimator == "reinforce_plus_plus_baseline":
        rewards = group_relative(rewards, groups, normalize_std=False)
    remaining = segments.remaining()
    token_rewards = torch.where(remaining == 0, rewards[segments.sample_of[segments.learned]], 0.0)
    if penalty is not None:
        token_rewards = token_rewards - penalty
    if estimator != "ppo":
        returns = discounted_suffix_sums(token_rewards, remaining, gamma)
        return Advantages(segments.place(whitened(returns)), None)

    if values is None:
        raise ValueError("--advantage-estimator ppo needs a critic's values")
    learned_values = segments.select(values)
    advantages = gae(token_rewards, learned_values, remaining, gamma=gamma, lam=lam)
    returns = advantages + learned_values
    return Advantages(segments.place(whitened(advantages) if whiten else advantages), segments.place(returns))


def distillation_advantages(segments: Segments, student_log_probs: Tensor, teacher_log_probs: Tensor) -> Tensor:
    """-(log p_student - log p_teacher) at each learned token, [N] fp32, 0 elsewhere.

    On-policy distillation as a policy gradient: per-token reverse KL against the teacher, to be scaled and added to
    other advantages or used alone (https://arxiv.org/abs/2306.13649). See also `losses.distillation_loss`.
    """
    return segments.place(segments.select(teacher_log_probs) - segments.select(student_log_probs))


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
    """1 - Var(returns - values) / Var(returns) over learned tokens: 1 = a perfect critic; 0 if returns do not vary."""
    target = segments.select(returns)
    if len(target) < 2 or bool(target.min() == target.max()):
        return 0.0
    return float(1 - (target - segments.select(values)).var() / target.var())
