"""Validation in SFT: the loss on the held-out conversations of `--eval-prompt-data`."""

from __future__ import annotations

import math
from collections.abc import Sequence

from slime_retool.errors import DataError
from slime_retool.rollout.context import RolloutContext
from slime_retool.rollout.sft_rollout import to_train_sample
from slime_retool.types import Sample, TrainSample


def held_out_samples(context: RolloutContext, eval_sets: dict[str, list[Sample]]) -> dict[str, list[TrainSample]]:
    """Every conversation of every set as ids and mask, in file order; those longer than `rollout_max_context_len` not.

    Raises DataError for a conversation that cannot be tokenized (a metric over another set each time would tell
    nothing), and for a set of which none is left.
    """
    config = context.config
    found: dict[str, list[TrainSample]] = {}
    for name, samples in eval_sets.items():
        kept = []
        for sample in samples:
            try:
                train_sample = to_train_sample(context.conversations, sample)
            except DataError as error:
                raise DataError(f"held-out set {name!r}, conversation {sample.index + 1}: {error}") from error
            if config.fits_context(train_sample.length):
                kept.append(train_sample)
        if not kept:
            raise DataError(
                f"held-out set {name!r}: none of its {len(samples)} conversations has at most "
                f"--rollout-max-context-len {config.rollout_max_context_len} tokens; raise it, or give shorter ones"
            )
        found[name] = kept
    return found


def held_out_metrics(name: str, samples: Sequence[TrainSample], log_probs: Sequence[float]) -> dict[str, float]:
    """`eval/<name>/loss` (mean negative log-likelihood of a supervised token, nats), its perplexity, and token counts.

    log_probs: one value per token of all samples, one sample after the other (the first token of each is not read).
    """
    mask = [learned for sample in samples for learned in sample.loss_mask]
    assert len(mask) == len(log_probs), (len(mask), len(log_probs))
    learned = [value for value, is_learned in zip(log_probs, mask, strict=True) if is_learned]
    loss = -math.fsum(learned) / max(len(learned), 1)
    return {
        f"eval/{name}/loss": loss,
        f"eval/{name}/perplexity": math.exp(min(loss, 700.0)),
        f"eval/{name}/samples": float(len(samples)),
        f"eval/{name}/supervised_tokens": float(len(learned)),
    }
