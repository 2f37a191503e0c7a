"""Calls to Ray actors, with the errors that their callers know."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from slime_retool.engine.process import ServerError

logger = logging.getLogger(__name__)
STOP_SECONDS = 60.0


def call(actors: list[Any], method: str, *arguments: Any, **options: Any) -> list[Any]:
    """Start a method on every actor. Returns what `results` waits for."""
    return [getattr(actor, method).remote(*arguments, **options) for actor in actors]


def results(refs: list[Any]) -> list[Any]:
    """Results of calls, raising the actor's own exception instead of Ray's wrapper around it.

    Waits for the first failure, not for all: when one rank fails, the others sit in a collective.
    """
    pending = list(refs)
    try:
        while pending:
            done, pending = ray.wait(pending, num_returns=1)
            ray.get(done)
        return ray.get(refs)
    except RayTaskError as error:
        if isinstance(error.cause, Exception):
            raise error.cause from error
        raise
    except RayActorError as error:
        raise ServerError(f"a process of the run ended, or its host: {error}") from error


def end(what: str, actors: list[Any], method: str) -> None:
    """Let actors end what they started, then end them; where Ray has ended so have they. Never raises."""
    if not ray.is_initialized():
        return
    quietly(what, lambda: ray.get(call(actors, method), timeout=STOP_SECONDS))
    for actor in actors:
        quietly(what, partial(ray.kill, actor))


def quietly(what: str, action: Callable[[], Any]) -> None:
    """Run `action`; what it raises becomes a warning, so that the error which led here is the one seen."""
    try:
        action()
    except (RayError, OSError, RuntimeError, ValueError) as error:
        logger.warning("while ending %s: %s", what, error)
