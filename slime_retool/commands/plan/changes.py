"""Which flags would make a run fit, and which would make one that fits faster."""

from __future__ import annotations

import copy
import itertools
from dataclasses import dataclass

from megatron_bridge.arithmetic.cards import Card
from slime_retool.commands.plan.memory import engine_memory
from slime_retool.commands.plan.plan import check_layout, find_problems, make_plan, memory_of_moments
from slime_retool.commands.plan.settings import Setting, flags_of, settings_that_save_memory, settings_that_save_time
from slime_retool.commands.plan.workload import Workload
from slime_retool.config import Config
from slime_retool.errors import ConfigError

MOST_CHANGES = 4
"""Settings that are changed together."""
MOST_CHOICES = 3
"""Ways to make a run fit that are named."""
FASTER = 0.03
"""Share of a rollout's seconds that a change must save to be named; less is within the plan's error."""


@dataclass(frozen=True, slots=True)
class Change:
    """Flags to add to those given (the last of a repeated flag counts), and what the run is with them."""

    flags: str
    resident: int
    seconds: float
    gpus: int


def changes_that_fit(config: Config, card: Card, workload: Workload) -> list[Change]:
    """The fewest settings that must change; of each choice of settings the values with least GPU time, best first.

    At most `MOST_CHOICES` choices.
    """
    groups = list(filter(None, settings_that_save_memory(config)))
    for count in range(1, MOST_CHANGES + 1):
        found: list[Change] = []
        for chosen in itertools.combinations(groups, count):
            merged = (dict(itertools.chain(*map(dict.items, settings))) for settings in itertools.product(*chosen))
            changes = (_change(config, card, workload, setting) for setting in merged)
            fitting = [change for change in changes if change is not None]
            if fitting:
                found.append(min(fitting, key=_gpu_seconds))
        if found:
            return sorted(found, key=_gpu_seconds)[:MOST_CHOICES]
    return []


def changes_that_speed_up(config: Config, card: Card, workload: Workload, seconds: float) -> list[Change]:
    """The setting that saves most of a rollout's `seconds` on the same GPUs, then the one that saves most beside it,
    and so on; each change includes those before it. Only what leaves the training the same but for rounding.
    """
    groups = list(filter(None, settings_that_save_time(config)))
    chosen: Setting = {}
    changes: list[Change] = []
    while True:
        tried = [
            (change, chosen | setting, group)
            for group in groups
            for setting in group
            if (change := _change(config, card, workload, chosen | setting)) is not None
        ]
        best = min(tried, key=lambda found: found[0].seconds, default=None)
        if best is None or best[0].seconds > (1 - FASTER) * seconds:
            return changes
        change, chosen, group = best
        changes.append(change)
        groups.remove(group)
        seconds = change.seconds


def _change(config: Config, card: Card, workload: Workload, setting: Setting) -> Change | None:
    """The run with `setting`; None where it cannot be built or does not fit."""
    # Some runs have hundreds of thousands of candidates: `dataclasses.replace` would take as long as the plan itself,
    # and what is quick and refuses most comes first.
    changed = copy.copy(config)
    changed.__dict__.update(setting)
    if changed.num_engines and engine_memory(changed, card).kv_tokens < workload.longest:
        return None
    try:
        check_layout(changed)
    except ConfigError:
        return None
    _, engine, moments = memory_of_moments(changed, card, workload)
    if find_problems(card, workload, engine, moments):
        return None
    plan = make_plan(changed, card, workload)
    return Change(flags_of(setting), plan.resident, plan.time.total, plan.gpus)


def _gpu_seconds(change: Change) -> tuple[float, str]:
    return change.seconds * change.gpus, change.flags
