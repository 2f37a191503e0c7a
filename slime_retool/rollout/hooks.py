"""Run the user's `generate` and `reward_func` on samples, and keep outages apart from mistakes.

An outage (`RolloutError`: engine, tool, reward) marks one sample FAILED. Any other exception is a mistake in a hook: it
ends the rollout at once, with its traceback; one that the reward function raises costs its sample, like an outage.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from slime_retool.config import Config
from slime_retool.data.rows import RowCheck, ToolsCheck
from slime_retool.engine.process import ServerError
from slime_retool.errors import ConfigError, PromptTooLong, RolloutError, TrainerDied, UserError
from slime_retool.protocols import GenerateFn, load_function, load_module
from slime_retool.reward.runner import RewardRunner
from slime_retool.rollout.context import current_attempts, current_context
from slime_retool.rollout.failure_log import FailureLog
from slime_retool.types import Sample, SampleStatus, Span, timed

logger = logging.getLogger(__name__)

DEFAULT_GENERATE = "slime_retool.rollout.generate.generate"
DEFAULT_REWARD = "slime_retool.reward.registry.default_reward"
"""Scores by `--rm-type`."""

USABLE = (SampleStatus.COMPLETED, SampleStatus.TRUNCATED)
CANCEL_PATIENCE_SECONDS = 5.0


class BusyTime:
    """Seconds in which at least one task was inside `with busy_time:`."""

    def __init__(self) -> None:
        self._before = 0.0
        self._inside = 0
        self._since = 0.0

    @property
    def seconds(self) -> float:
        """Until now."""
        return self._before + (time.monotonic() - self._since if self._inside else 0.0)

    def __enter__(self) -> None:
        if not self._inside:
            self._since = time.monotonic()
        self._inside += 1

    def __exit__(self, *exc: object) -> None:
        self._inside -= 1
        if not self._inside:
            self._before += time.monotonic() - self._since


@dataclass(frozen=True, slots=True)
class Hooks:
    """The two functions of a run, and the names they are reported under."""

    generate: GenerateFn
    reward: RewardRunner
    """Runs the `RewardFn`."""
    generate_path: str
    reward_path: str
    reward_time: BusyTime = field(default_factory=BusyTime)
    failures: FailureLog = field(default_factory=FailureLog)
    """Whoever loads the hooks closes it after the last sample."""

    @classmethod
    def load(cls, config: Config) -> Hooks:
        """Import what the configuration names. Raises ConfigError for a path that names no such hook."""
        generate = config.custom_generate_function_path or DEFAULT_GENERATE
        reward = config.custom_rm_path or DEFAULT_REWARD
        return cls(
            load_function(generate, "--custom-generate-function-path"),
            RewardRunner(
                load_function(reward, "--custom-rm-path"),
                reward,
                # The built-in reward has a deadline of its own, which does not count waiting.
                timeout=None if reward == DEFAULT_REWARD else config.reward_timeout,
            ),
            generate,
            reward,
        )


def row_checks(config: Config) -> list[RowCheck]:
    """What the hooks need of a data row: `check_prompt` and `check_tools` of the module of `generate`, `check_label` of
    the reward's.

    A module without such a function takes every row.
    """
    generate = load_module(config.custom_generate_function_path or DEFAULT_GENERATE).__dict__
    reward = load_module(config.custom_rm_path or DEFAULT_REWARD).__dict__
    checks: list[RowCheck] = [generate["check_prompt"]] if "check_prompt" in generate else []
    if "check_tools" in generate:
        checks.append(ToolsCheck(generate["check_tools"]))
    return [*checks, reward["check_label"]] if "check_label" in reward else checks


async def run_sample(
    config: Config,
    hooks: Hooks,
    sample: Sample,
    sampling_params: dict[str, Any],
    *,
    with_ids: bool = True,
    answers_all: bool = False,
) -> Sample:
    """Generate and score one sample; returns it COMPLETED, TRUNCATED, ABORTED or FAILED.

    `with_ids`: the sample must hold the ids that the model wrote (a chat API returns none). `answers_all`: a prompt
    that leaves no room for a response gets an empty, TRUNCATED one, and is scored, where it would be FAILED.

    Raises whatever a hook raises that is not a RolloutError, and ConfigError when `generate` returns anything but a
    generated, consistent sample.
    """
    where = hooks.generate_path
    spans: list[Span] = []
    attempts = current_attempts()
    attempt = attempts.begin(sample)
    try:
        try:
            with timed("generate", spans):
                generated = await hooks.generate(config, sample, dict(sampling_params))
        except PromptTooLong as error:
            if not answers_all:
                raise
            sample.status, sample.error = SampleStatus.TRUNCATED, str(error)
        else:
            _check_generated(generated, sample.index, hooks.generate_path, with_ids)
            sample = attempt.sample = generated
        if sample.status in USABLE:
            where = hooks.reward_path
            await _score(config, hooks, sample, spans)
    except RolloutError as error:
        sample.status, sample.error = SampleStatus.FAILED, _failure(hooks, sample, error)
    except (UserError, ServerError, TrainerDied):  # says in one line what is wrong, and is no mistake in a hook
        raise
    except Exception:
        logger.error("%s raised at sample %d; this ends the rollout", where, sample.index)
        raise
    finally:
        sample.spans = [*spans, *sample.spans]
        attempts.end(attempt)
    return sample


async def score_again(config: Config, hooks: Hooks, sample: Sample) -> Sample:
    """A new reward for a sample that was generated before; an outage makes it FAILED, as in `run_sample`.

    Raises whatever the hook raises that is not a RolloutError.
    """
    spans: list[Span] = []
    try:
        await _score(config, hooks, sample, spans)
    except RolloutError as error:
        sample = replace(sample, reward=None, status=SampleStatus.FAILED, error=_failure(hooks, sample, error))
    sample.spans = [*(span for span in sample.spans if span["name"] != "reward"), *spans]
    return sample


async def _score(config: Config, hooks: Hooks, sample: Sample, spans: list[Span]) -> None:
    with hooks.reward_time, timed("reward", spans):
        sample.reward = await hooks.reward(config, sample)
    sample.reward_value(config.reward_key)  # raises where it holds none


def _failure(hooks: Hooks, sample: Sample, error: RolloutError) -> str:
    """What `Sample.error` says of an outage; the log says it too."""
    text = f"{error.boundary}: {error}"
    hooks.failures.add(error.boundary, f"sample {sample.index} failed at the {text}", error.__cause__)
    return text


async def run_all(coroutines: Iterable[Coroutine[Any, Any, Sample]]) -> list[Sample]:
    """Results in order. The first exception cancels the rest, waits for it (see `cancel`) and is raised."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        await cancel(tasks)
        raise


async def cancel(tasks: Sequence[asyncio.Future[Any]]) -> None:
    """Cancel tasks and wait for them, but only a few seconds: a hook may refuse to end."""
    for task in tasks:
        task.cancel()
        # Looks at its exception, so that asyncio does not report it as never seen.
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    if tasks:
        _, stubborn = await asyncio.wait(tasks, timeout=CANCEL_PATIENCE_SECONDS)
        if stubborn:
            logger.warning("%d tasks ignore their cancellation and are left to themselves", len(stubborn))


def _check_generated(sample: Any, index: int, path: str, with_ids: bool) -> None:
    if not isinstance(sample, Sample):
        got = f"{type(sample).__name__} for sample {index}"
        raise ConfigError(f"{path} must return the sample, got {got}; end it with `return sample`")
    if sample.status == SampleStatus.PENDING:
        raise ConfigError(f"{path} left sample {sample.index} PENDING; set its status (COMPLETED, TRUNCATED, ...)")
    if sample.status in USABLE:
        try:
            sample.check()
        except ValueError as error:
            raise ConfigError(f"{path}: {error}") from error
        if with_ids and not any(sample.loss_mask):
            raise ConfigError(f"{path} returned sample {sample.index} as {sample.status.value} without a model token")
        if with_ids and not sample.prompt_length:
            raise ConfigError(
                f"{path} returned sample {sample.index} without its prompt: set sample.tokens to the prompt's ids "
                "before the first sample.append(...)"
            )
        if with_ids and not sample.response:
            ids = sample.tokens[sample.prompt_length :]
            text = current_context().tokenizer.decode(ids, skip_special_tokens=True)
            if text.strip():
                raise ConfigError(
                    f"{path} left the response of sample {sample.index} empty, which is what rewards read, and the "
                    f"model wrote {text[:60]!r}: set sample.response"
                )
