"""`--rollout-function-path` of SFT: conversations become training samples, without an engine."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter

from slime_retool.errors import DataError
from slime_retool.protocols import DataSource
from slime_retool.rollout.context import RolloutContext
from slime_retool.rollout.failure_log import FailureLog
from slime_retool.rollout.sft_tokens import NO_CONVERSATION, ConversationTokenizer
from slime_retool.types import RolloutBatch, Sample, TrainSample


async def generate_rollout(context: RolloutContext, data: DataSource, rollout_id: int) -> RolloutBatch:
    """The next `rollout_batch_size` usable conversations as token ids and loss masks.

    A conversation that is longer than `rollout_max_context_len`, or that the chat template cannot render, is left
    out and counted, never cut (a cut answer teaches an unfinished one); the next row takes its place.

    Raises DataError when `max_sampling_rounds` times as many rows did not fill the batch.
    """
    # In a thread: rendering is pure CPU work and must not hold the event loop.
    stop = threading.Event()
    with FailureLog() as failures:
        try:
            return await asyncio.to_thread(_make_batch, context, data, failures, stop)
        finally:
            stop.set()  # a thread cannot be cancelled, and the process waits for it


def _make_batch(
    context: RolloutContext, data: DataSource, failures: FailureLog, stop: threading.Event
) -> RolloutBatch:
    config = context.config
    assert config.rollout_batch_size is not None
    kept: list[TrainSample] = []
    too_long = refused = drawn = 0
    sources: Counter[str] = Counter()
    reason = ""
    while len(kept) < config.samples_per_rollout:
        if drawn >= config.max_sampling_rounds * config.samples_per_rollout:
            raise DataError(
                f"{len(kept)} of {drawn} conversations can be trained on, a batch needs {config.samples_per_rollout}: "
                f"{too_long} have more than --rollout-max-context-len {config.rollout_max_context_len} tokens, "
                f"{refused} were refused"
                + (f", the last because {reason}" if reason else "")
            )
        missing = config.samples_per_rollout - len(kept)
        groups = data.next_groups(missing // config.n_samples_per_prompt)
        for sample in (sample for group in groups for sample in group):
            if stop.is_set():
                raise asyncio.CancelledError
            drawn += 1
            try:
                train_sample = to_train_sample(context.conversations, sample)
            except DataError as error:
                refused, reason = refused + 1, str(error)
                failures.add("data", f"conversation {sample.index} left out: {error}")
                continue
            if config.fits_context(train_sample.length):
                kept.append(train_sample)
                sources[sample.source] += 1
            else:
                too_long += 1
    metrics = {
        "rollout/samples": len(kept),
        "rollout/tokens": sum(sample.length for sample in kept),
        "rollout/supervised_tokens": sum(sample.num_loss_tokens for sample in kept),
        "rollout/skipped_too_long": too_long,
        "rollout/skipped_refused": refused,
    }
    metrics |= {f"rollout/{source}/samples": count for source, count in sorted(sources.items()) if source}
    return RolloutBatch(kept, {name: float(value) for name, value in metrics.items()})


def to_train_sample(tokenize: ConversationTokenizer, sample: Sample) -> TrainSample:
    """A row's conversation as ids and mask. Raises DataError for one that cannot be trained on."""
    if isinstance(sample.prompt, str):
        raise DataError(NO_CONVERSATION)
    tokens, loss_mask = tokenize(sample.prompt, sample.tools)
    if loss_mask:
        loss_mask[0] = 0
    return TrainSample(tokens, loss_mask, index=sample.index, group_index=sample.group_index)
