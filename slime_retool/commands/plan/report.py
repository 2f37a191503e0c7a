"""A plan as a page for the terminal, or as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from megatron_bridge.arithmetic import GIB
from slime_retool.commands.plan.changes import MOST_CHANGES, Change
from slime_retool.commands.plan.plan import Plan

NAMES = {"others": "critic"}
"""What parts are called for users: the only model beside the first one that there is."""


def as_dict(plan: Plan, changes: Sequence[Change]) -> dict[str, Any]:
    """For --json."""
    found = asdict(plan)
    for part in ("trainer", "time"):
        found[part] = {NAMES.get(name, name): value for name, value in found[part].items()}
    return {
        **found,
        "fits": plan.fits,
        "resident": plan.resident,
        "trainer_total": plan.trainer.total,
        "engine_total": plan.engine.total if plan.engine else None,
        "tokens": plan.workload.tokens,
        "step_seconds": plan.time.total,
        "changes": [asdict(change) for change in changes],
    }


def as_text(plan: Plan, changes: Sequence[Change]) -> str:
    """A page for the terminal."""
    t, e, s = plan.trainer, plan.engine, plan.time
    active = f" ({plan.active_parameters / 1e9:.2f}B for a token)" if plan.active_parameters < plan.parameters else ""
    lines = [f"{plan.parameters / 1e9:.2f}B parameters{active} on {plan.gpus} x {plan.card.name}"]
    lines += ["", "trainer, on the fullest GPU"]
    lines += _gib(
        weights=t.weights, gradients=t.gradients, optimizer=t.optimizer, others=t.others, activations=t.activations,
        logits=t.logits, runtime=t.runtime, together=t.total,
    )  # fmt: skip
    if e is not None:
        lines += ["", "engine, on each of its GPUs"]
        lines += _gib(weights=e.weights, adapters=e.adapters, KV_cache=e.kv_cache, runtime=e.runtime, together=e.total)
        lines.append(f"  the cache holds {e.kv_tokens:,} tokens")
    lines += ["", "on the fullest GPU while"] + _gib(**plan.moments)
    if plan.host:
        lines.append(f"page-locked memory of each training host: {plan.host / GIB:.0f} GiB")
    lines.append(f"a checkpoint on disk: {plan.disk / GIB:.1f} GiB")
    share = f"{plan.resident / GIB:.1f} of {plan.card.memory_bytes / GIB:.1f} GiB"
    lines += ["", f"{'fits' if plan.fits else 'DOES NOT FIT'}: {share}"]
    lines += [f"  {problem}" for problem in plan.problems]
    lines += [
        "",
        f"one rollout: {plan.workload.tokens:,.0f} tokens, {plan.micro_batches} micro-batch(es) per optimizer step "
        "and rank",
    ]
    for name, seconds in (*asdict(s).items(), ("together", s.total)):
        if seconds or name == "together":
            lines.append(f"  {NAMES.get(name, name).replace('_', '-'):<12}{seconds:8.1f} s")
    lines.append(f"  training at {100 * plan.mfu:.0f} % MFU")
    if plan.fits and changes:
        lines += ["", "what would make it faster, by this plan (each line with those above)"]
    if not plan.fits:
        none = f"no {MOST_CHANGES} changes of these flags make it fit: take larger GPUs, or start from parallel sizes"
        lines += ["", "what would make it fit" if changes else none]
    for change in changes:
        seconds = f"{change.seconds:.0f}" if change.seconds >= 100 else f"{change.seconds:.1f}"
        lines.append(f"  {change.flags}   ({change.resident / GIB:.1f} GiB, {seconds} s a rollout, {change.gpus} GPUs)")
    return "\n".join(lines)


def _gib(**parts: int) -> list[str]:
    shown = {NAMES.get(name, name).replace("_", " "): value for name, value in parts.items() if value}
    return [f"  {name:<12}{value / GIB:8.1f} GiB" for name, value in shown.items()]
