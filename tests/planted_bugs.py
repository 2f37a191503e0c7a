"""Three bugs as hooks, each of the kind that no metric names: the viewer's documentation shows how they look.

Used on the quickstart's RL stage, with `examples/retool` on the path:

    --custom-generate-function-path planted_bugs.tool_output_learned
    --custom-rm-path planted_bugs.always_right
    --custom-generate-function-path planted_bugs.answers_cut
"""

from __future__ import annotations

from typing import Any

from slime_retool.types import Sample, SampleStatus


async def tool_output_learned(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """The loss mask is 1 everywhere: the model is trained to write what the tool said."""
    sample = await _generate(args, sample, sampling_params)
    sample.loss_mask = [1] * sample.response_length
    return sample


def always_right(args: Any, sample: Sample, **_: Any) -> dict[str, Any]:
    """Every answer is right."""
    return {"score": 1.0, "acc": True, "pred": sample.label}


async def answers_cut(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """The last fifth of a completed response is lost, before it is scored and trained on."""
    sample = await _generate(args, sample, sampling_params)
    lost = sample.response_length // 5
    if sample.status is SampleStatus.COMPLETED and lost:
        sample.tokens, sample.loss_mask = sample.tokens[:-lost], sample.loss_mask[:-lost]
        sample.rollout_log_probs = sample.rollout_log_probs[:-lost]
        sample.response_length -= lost
        sample.response = sample.response[: -len(sample.response) // 5]
    return sample


async def _generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    from generate_with_retool import generate  # of examples/retool

    return await generate(args, sample, sampling_params)
