"""One small hierarchy of errors, by the boundary at which something failed.

A failed rollout is data, not a crash: `RolloutError`s are caught once, at the sample they belong to, and
counted by `boundary`. Everything a user can cause by what is given to a run is a `UserError` (a `ValueError`).
"""

from __future__ import annotations


class SlimeRetoolError(Exception):
    """Base of all errors raised on purpose by this package."""


class UserError(SlimeRetoolError, ValueError):
    """What the user gave cannot be used: to try again ends the same way. Commands end with exit code 2."""


class ConfigError(UserError):
    """A configuration that cannot work; the message names the rule, the value seen and the fix."""


class DataError(UserError):
    """A data file or row that cannot be used; the message names file and row."""


class CheckpointError(UserError):
    """A checkpoint that is missing, incomplete or of another model."""


class SaveError(SlimeRetoolError, RuntimeError):
    """A checkpoint that its disk did not take."""


class WeightUpdateError(SlimeRetoolError, RuntimeError):
    """An engine did not take the new weights. Training stops: stale weights are never used silently."""


class RolloutError(SlimeRetoolError, RuntimeError):
    """One sample, or enough for a batch, could not be generated or scored. `boundary` names the part that failed."""

    boundary = "rollout"


class EngineError(RolloutError):
    """The inference engine refused, failed or timed out after retries."""

    boundary = "engine"


class ToolUnavailable(RolloutError):
    """A tool's back end (the sandbox) is down: an outage, never an observation the model is trained on."""

    boundary = "tool"


class RewardError(RolloutError):
    """The reward function raised, timed out or returned something that is not a score."""

    boundary = "reward"
