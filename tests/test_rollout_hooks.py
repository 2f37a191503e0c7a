"""A hook is refused at the start when a call of it would fail: its flag, path and signature are named."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Awaitable
from typing import Any

import pytest

from slime_retool.errors import ConfigError
from slime_retool.protocols import HOOKS, load_function
from slime_retool.types import RolloutBatch, Sample

GENERATE, REWARD = "--custom-generate-function-path", "--custom-rm-path"
FILTER, ROLLOUT = "--dynamic-sampling-filter-path", "--rollout-function-path"


@pytest.fixture
def load(monkeypatch):
    """Loads a function as a user's module holds it."""

    def of(flag: str, function: Any) -> Any:
        module = types.ModuleType("user_hooks")
        module.__dict__["hook"] = function
        monkeypatch.setitem(sys.modules, "user_hooks", module)
        return load_function("user_hooks.hook", flag)

    return of


async def generate(args, sample, sampling_params): ...


def generate_later(args, sample, sampling_params) -> Awaitable[Sample]:
    return generate(args, sample, sampling_params)


class Generator:
    async def __call__(self, args, sample, sampling_params): ...


class ScoredWith:
    def __call__(self, args, sample, *, weight=1.0): ...


async def generate_with(settings, args, sample, sampling_params): ...


async def reward(args, sample): ...


async def reward_with_more(args, sample, **kwargs): ...


def keep(args, group): ...


async def rollout(context, data, rollout_id) -> RolloutBatch: ...


def test_hooks_that_can_be_called_are_taken_as_they_are(load):
    bound = functools.partial(generate_with, {"a": 1})
    for flag, function in (
        (GENERATE, generate), (GENERATE, generate_later), (GENERATE, Generator()), (GENERATE, bound),
        (GENERATE, Generator().__call__), (REWARD, reward), (REWARD, reward_with_more), (REWARD, ScoredWith()),
        (REWARD, lambda args, sample: 1.0), (FILTER, keep), (ROLLOUT, rollout),
    ):  # fmt: skip
        assert load(flag, function) is function


def test_a_decorated_hook_is_judged_by_what_is_called(load):
    async def with_client(client, args, sample, sampling_params) -> Sample: ...

    @functools.wraps(with_client)
    def hook(*given):
        return with_client("client", *given)

    assert load(GENERATE, hook) is hook


def test_a_builtin_without_a_signature_is_taken(load):
    assert load(FILTER, max) is max


async def two(args, sample): ...


async def keyword(args, sample, sampling_params, *, seed): ...


async def four(context, data, rollout_id, more): ...


def one(group): ...


def no_keywords(sample): ...


@pytest.mark.parametrize(
    ("flag", "function", "found", "right"),
    [
        (GENERATE, two, "(args, sample)", "async def GenerateFn(args, sample, sampling_params)"),
        (GENERATE, keyword, "(args, sample, sampling_params, *, seed)", "missing a required"),
        (GENERATE, functools.partial(generate_with), "(settings, args, sample, sampling_params)", "async def"),
        (REWARD, no_keywords, "(sample)", "async def RewardFn(args, sample)"),
        (REWARD, Generator(), "(args, sample, sampling_params)", "RewardFn(args, sample)"),
        (FILTER, one, "(group)", ": def FilterFn(args, group)"),
        (ROLLOUT, four, "(context, data, rollout_id, more)", "async def RolloutFn(context, data, rollout_id)"),
    ],
)
def test_a_hook_with_other_arguments_is_refused_with_both_signatures(load, flag, function, found, right):
    with pytest.raises(ConfigError) as error:
        load(flag, function)
    text = str(error.value)
    assert text.startswith(f"{flag} 'user_hooks.hook'") and f"signature {found}" in text and right in text
    assert "\n" not in text


def generate_at_once(args, sample, sampling_params) -> Sample: ...


def generate_pieces(args, sample, sampling_params):
    yield sample


async def generate_pieces_async(args, sample, sampling_params):
    yield sample


class NoHook:
    def __init__(self, args, sample, sampling_params): ...


@pytest.mark.parametrize("function", [generate_at_once, generate_pieces, generate_pieces_async, NoHook])
def test_a_generate_that_cannot_be_awaited_is_refused(load, function):
    with pytest.raises(ConfigError, match="cannot be awaited; it must be like: async def"):
        load(GENERATE, function)


def test_an_async_filter_is_refused_since_it_would_keep_every_group(load):
    async def keep_async(args, group): ...

    with pytest.raises(ConfigError, match="is async.*it must be like: def FilterFn"):
        load(FILTER, keep_async)


def test_what_is_no_function_is_refused(load):
    with pytest.raises(ConfigError, match="'user_hooks.hook' is a int and not a function"):
        load(REWARD, 3)


def test_the_products_own_hooks_fit():
    for flag, path in (
        (GENERATE, "slime_retool.rollout.generate.generate"),
        (REWARD, "slime_retool.reward.registry.default_reward"),
        (FILTER, "slime_retool.rollout.filters.check_reward_nonzero_std"),
        (ROLLOUT, "slime_retool.rollout.rl_rollout.generate_rollout"),
        (ROLLOUT, "slime_retool.rollout.sft_rollout.generate_rollout"),
    ):
        assert flag in HOOKS and callable(load_function(path, flag))
