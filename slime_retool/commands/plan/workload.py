"""The samples that a plan is made for: how many, how long, and how much of them is learned."""

from __future__ import annotations

from dataclasses import dataclass

from slime_retool.config import Config

LONGEST_TO_MEAN = 2.0
"""Without better knowledge, response lengths are taken as uniform between 0 and twice the mean."""


@dataclass(frozen=True, slots=True)
class Workload:
    """The samples of one rollout, in tokens."""

    samples: int
    mean_prompt: float
    mean_response: float
    longest: float
    attended: float
    """Sum of squared lengths over sum of lengths: the length of the sequence that a mean token lies in."""
    learned: float = 1.0
    """Share of the tokens whose log-probs are made: the output layer works for these only."""

    @classmethod
    def from_means(
        cls, samples: int, mean_prompt: float, mean_response: float, longest: float | None = None
    ) -> Workload:
        """Prompts alike, responses uniform between 0 and twice their mean: their squares have 4/3 of the mean's.

        `longest`: what a sample may have, where that is known.
        """
        mean = mean_prompt + mean_response
        squares = mean_prompt**2 + 2 * mean_prompt * mean_response + 4 / 3 * mean_response**2
        if longest is None:
            longest = mean_prompt + LONGEST_TO_MEAN * mean_response
        return cls(samples, mean_prompt, mean_response, longest, squares / mean, mean_response / mean)

    @classmethod
    def of_run(cls, config: Config, mean_prompt: float, mean_response: float) -> Workload:
        """The samples of one rollout. With engines, some response runs into its limit."""
        longest = None
        if config.rollout_max_context_len is not None:
            longest = max(config.rollout_max_context_len, mean_prompt + mean_response)
        elif config.num_engines:
            longest = mean_prompt + max(config.rollout_max_response_len, mean_response)
        return cls.from_means(config.samples_per_rollout, mean_prompt, mean_response, longest)

    @property
    def mean(self) -> float:
        """Tokens of a sample."""
        return self.mean_prompt + self.mean_response

    @property
    def tokens(self) -> float:
        return self.samples * self.mean
