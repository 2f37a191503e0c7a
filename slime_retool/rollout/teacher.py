"""Log-probs of sampled tokens under a teacher model, for on-policy distillation (`--teacher-url`, `--distill-coef`)."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence

from slime_retool.config import Config
from slime_retool.rollout.context import RolloutContext
from slime_retool.rollout.engine_client import RouterClient
from slime_retool.types import TrainSample


async def add_teacher_log_probs(context: RolloutContext, samples: Sequence[TrainSample]) -> None:
    """Fill in the column `teacher_log_probs` of all samples, which the teacher reads at once and generates nothing for.

    The teacher needs the model's tokenizer: ids are compared, not texts. Raises EngineError when it cannot be reached
    after its retries, or answers for other tokens.
    """
    client = await context.resource("teacher", _connect)
    rows = await asyncio.gather(*(client.prompt_log_probs(list(sample.tokens)) for sample in samples))
    for sample, row in zip(samples, rows, strict=True):
        sample.columns["teacher_log_probs"] = array("f", row)


def _connect(config: Config) -> RouterClient:
    assert config.teacher_url is not None
    return RouterClient(
        config.teacher_url,
        concurrency=config.sglang_server_concurrency,
        timeout=config.rollout_request_timeout,
        retries=config.rollout_request_retries,
    )
