"""Calls to Ray actors, with the errors that their callers know."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from slime_retool.engine.process import ServerError
from slime_retool.errors import SlimeRetoolError

logger = logging.getLogger(__name__)
STOP_SECONDS = 60.0
DEATH_SECONDS = 20.0
"""For Ray to learn that a process died, after its peers saw it."""


def call(actors: list[Any], method: str, *arguments: Any, **options: Any) -> list[Any]:
    """Start a method on every actor. Returns what `results` waits for."""
    return [getattr(actor, method).remote(*arguments, **options) for actor in actors]


def results(refs: list[Any], *, died: type[SlimeRetoolError] = ServerError) -> list[Any]:
    """Results of calls, raising the actor's own exception instead of Ray's wrapper around it, `died` where it died.

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
        raise died(f"a process of the run ended, or its host: {first_line(error)}") from error


def death_of(actors: list[Any]) -> str | None:
    """What Ray says of the first of these actors that died, if any; one that is busy lives."""
    questions = [actor.__ray_ready__.remote() for actor in actors]
    answered, _ = ray.wait(questions, num_returns=len(questions), timeout=DEATH_SECONDS) if questions else ([], [])
    for question in answered:
        try:
            ray.get(question)
        except RayActorError as error:
            return first_line(error)
        except RayError:
            continue
    return None


def first_line(error: BaseException) -> str:
    return str(error).strip().split("\n", 1)[0].rstrip(".")


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
