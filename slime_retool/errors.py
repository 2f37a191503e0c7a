"""One small hierarchy of errors, by the boundary at which something failed, and how a command ends with one.

A failed rollout is data, not a crash: `RolloutError`s are caught once, at the sample they belong to, and
counted by `boundary`. Everything a user can cause by what is given to a run is a `UserError` (a `ValueError`).
"""

from __future__ import annotations

import errno
import logging
import signal
import sys
from collections.abc import Callable
from typing import Any, NoReturn

logger = logging.getLogger("slime_retool")


class SlimeRetoolError(Exception):
    """Base of all errors raised on purpose by this package."""


class UserError(SlimeRetoolError, ValueError):
    """What the user gave cannot be used: to try again ends the same way. Commands end with exit code 2."""


class ConfigError(UserError):
    """A configuration that cannot work; the message names the rule, the value seen and the fix."""


class DataError(UserError):
    """A data file or row that cannot be used; the message names file and row."""


class MissingLabel(ConfigError):
    """A data row has no label, and the reward needs one."""


class UnreadableLabel(ConfigError):
    """A data row's label is one that no answer is equal to, not even itself."""


class CheckpointError(UserError):
    """A checkpoint that is missing, incomplete or of another model."""


class SaveError(SlimeRetoolError, RuntimeError):
    """A checkpoint that its disk did not take."""


class WeightUpdateError(SlimeRetoolError, RuntimeError):
    """An engine did not take the new weights. Training stops: stale weights are never used silently."""


class TrainerDied(SlimeRetoolError, RuntimeError):
    """A process that trains ended by itself, or its host did."""


class RolloutError(SlimeRetoolError, RuntimeError):
    """One sample, or enough for a batch, could not be generated or scored. `boundary` names the part that failed."""

    boundary = "rollout"


class PromptTooLong(RolloutError):
    """A prompt leaves no room for a response. To an evaluation that is no outage, but a problem that was not solved."""


class EngineError(RolloutError):
    """The inference engine refused, failed or timed out after retries."""

    boundary = "engine"


class ToolUnavailable(RolloutError):
    """A tool's back end (the sandbox) is down: an outage, never an observation the model is trained on."""

    boundary = "tool"


class RewardError(RolloutError):
    """The reward function raised, timed out or returned something that is not a score."""

    boundary = "reward"


def run_command(
    prog: str,
    command: Callable[[], int],
    *,
    mistakes: type[Exception] | tuple[type[Exception], ...] = UserError,
    interrupted: str = "interrupted",
) -> int:
    """Run `command` for its exit code, or end it in one line on stderr.

    `mistakes` (errors in what the user gave): 2. Ctrl-C and SIGTERM, which is made the same: 130, saying `interrupted`.
    Other SlimeRetoolErrors, and a disk that is full: 1. Everything else is a bug and keeps its traceback.
    """

    def interrupt(signum: int, frame: Any) -> NoReturn:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        return command()
    except KeyboardInterrupt:
        print(f"{prog}: {interrupted}", file=sys.stderr)
        return 130
    except mistakes as error:
        return refuse(prog, error)
    except SlimeRetoolError as error:
        logger.error("%s: %s", type(error).__name__, error)
        return 1
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        place = error.filename or "a folder that it writes to, such as --output-dir"
        logger.error("no room is left on the disk of %s (%s): make room and start it again", place, error.strerror)
        return 1
    finally:
        signal.signal(signal.SIGTERM, before)


def refuse(prog: str, error: object, code: int = 2) -> int:
    """Print the one line that a command ends with. Returns `code`."""
    print(f"{prog}: error: {error}", file=sys.stderr)
    return code
