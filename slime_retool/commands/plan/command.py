"""`slime-retool plan [--card NAME] [--mean-prompt N] [--mean-response N] [--json] FLAGS of slime_retool.train`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace

from megatron_bridge.arithmetic.cards import CARDS
from megatron_bridge.flags import from_namespace
from megatron_bridge.model_config import ModelArgs, check_model
from slime_retool.commands.plan.changes import changes_that_fit, changes_that_speed_up
from slime_retool.commands.plan.plan import check_layout, make_plan
from slime_retool.commands.plan.report import as_dict, as_text
from slime_retool.commands.plan.workload import Workload
from slime_retool.config import Config, resolve
from slime_retool.config.parse import build_parser
from slime_retool.config.require import require
from slime_retool.config.validate import check_values
from slime_retool.errors import ConfigError, run_command

PROG = "slime-retool plan"


def main(argv: Sequence[str] | None = None) -> int:
    """Print the plan. Returns 0 when the run fits, 1 when it does not, 2 for flags that cannot be planned."""
    parser = build_parser(
        PROG,
        usage=f"{PROG} [--card NAME] [--mean-prompt N] [--mean-response N] [--json] FLAGS of slime_retool.train",
        description="Memory and time of a run from its flags alone: no GPU, no checkpoint, no data is touched. FLAGS "
        "are those of `slime-retool train`, whose --help lists them: the model (or --hf-checkpoint), parallel sizes, "
        "batches, lengths, the algorithm and the engines count.",
        shown=(),
    )
    group = parser.add_argument_group("Plan")
    group.add_argument("--card", choices=sorted(CARDS), default="h100", help="kind of GPU (default: %(default)s)")
    group.add_argument("--mean-prompt", type=int, default=256, help="mean tokens of a prompt (default: %(default)s)")
    group.add_argument(
        "--mean-response", type=int, help="mean tokens of a response (default: half of --rollout-max-response-len)"
    )
    group.add_argument("--json", action="store_true", help="print JSON instead of a page")
    return run_command(PROG, lambda: _plan(parser.parse(argv)), mistakes=ValueError)


def _plan(parsed: argparse.Namespace) -> int:
    config = _completed(from_namespace(Config, parsed))
    mean_prompt, mean_response = parsed.mean_prompt, parsed.mean_response
    if mean_response is None:
        mean_response = max(1, config.rollout_max_response_len // 2)
    for flag, mean in (("--mean-prompt", mean_prompt), ("--mean-response", mean_response)):
        require(mean >= 1, f"{flag} must be at least 1, got {mean}")
    card = CARDS[parsed.card]
    check_layout(config)
    workload = Workload.of_run(config, mean_prompt, mean_response)
    plan = make_plan(config, card, workload)
    if plan.fits:
        changes = changes_that_speed_up(config, card, workload, plan.time.total)
    else:
        changes = changes_that_fit(config, card, workload)
    print(json.dumps(as_dict(plan, changes), indent=2) if parsed.json else as_text(plan, changes))
    return 0 if plan.fits else 1


def _completed(config: Config) -> Config:
    """The run on GPUs, with its model. ValueError for what cannot be planned."""
    check_values(config)
    require(not config.debug_rollout_only, "--debug-rollout-only trains nothing: a plan is of the run without it")
    if config.model_args != ModelArgs():
        config = replace(config, hf_checkpoint=None)  # it need not be on this machine
    elif config.hf_checkpoint is None:
        raise ConfigError("no model to plan: give the flags of one (scripts/models/*.sh), or --hf-checkpoint DIR")
    config = resolve(replace(config, device="cuda"))
    check_model(config)
    return config
