"""Responses at their length limit: DAPO's soft overlong punishment and overlong filtering, on the way to the trainer.

`Sample.reward` stays what the reward function said; filters and metrics use that.
"""

from __future__ import annotations

import dataclasses

from slime_retool.config import Config
from slime_retool.reward.shaping import overlong_penalty
from slime_retool.types import Sample, SampleStatus, TrainSample


def shaped_reward(config: Config, sample: Sample) -> float:
    """The reward to train on: with `--overlong-buffer-len` less for the last tokens that a response may have.

    The limit is what ends this sample's response. Observations count, as they do there. Where a long prompt leaves less
    than --rollout-max-response-len, the punished last part keeps its share of it: it never begins at the first token.
    """
    reward = sample.reward_value(config.reward_key)
    limit = config.response_limit(sample.prompt_length)
    if config.overlong_buffer_len is None or limit < 1:
        return reward
    buffer = config.overlong_buffer_len * limit / config.rollout_max_response_len
    return reward + config.overlong_penalty_factor * overlong_penalty(sample.response_length, limit, buffer)


def mask_overlong(config: Config, sample: Sample, train: TrainSample) -> TrainSample:
    """With `--overlong-filtering`, a truncated sample that nothing is learned from: its group still counts its reward.

    An answer that was cut off is not wrong because of what it says
    (https://arxiv.org/abs/2503.14476, section 3.4).
    """
    if not config.overlong_filtering or sample.status is not SampleStatus.TRUNCATED:
        return train
    return dataclasses.replace(train, loss_mask=[0] * train.length)
