"""A configuration as others may see it, without its secrets: flags for a shell, values for a tracker."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping
from typing import Any

from megatron_bridge import flags
from slime_retool.config.config import Config


def print_command_line(config: Config, prog: str, command: str) -> None:
    """Print `command` with the flags that make `config`, for a shell; on stderr, as `prog`, which secrets it lacks."""
    print(" \\\n  ".join([command, *flag_lines(config)]))
    for name in flags.secrets_in(config, *config.hook_args):
        print(f"{prog}: {flags.option_name(name)} is a secret and not printed", file=sys.stderr)


def flag_lines(config: Config) -> list[str]:
    """The configuration as flags for a shell, one option a line."""
    lines = option_lines(config, *config.hook_args)
    for name, values in config.sglang_server_flags.items():
        lines.append(shlex.join([f"--sglang-{name.removeprefix('--')}", *values]))
    return lines


def option_lines(*objects: Any) -> list[str]:
    """The flags that differ from their defaults, but secrets, for a shell, one option a line."""
    lines: list[str] = []
    for token in flags.to_flags(*objects):
        if token.startswith("--"):
            lines.append(token)
        else:
            lines[-1] += f" {shlex.quote(token)}"
    return lines


def wandb_settings(config: Config) -> dict[str, Any] | None:
    """Arguments of `wandb.init`; None without --use-wandb."""
    if not config.use_wandb:
        return None
    return {
        "project": config.wandb_project,
        "group": config.wandb_group,
        "name": config.wandb_name,
        "mode": config.wandb_mode,
        "dir": config.output_dir,
        "config": flag_values(config),
    }


def flag_values(config: Config) -> dict[str, Any]:
    """The value of each flag but secrets, by its field's name; what is handed to the servers under one name."""
    return flags.public_values(config, *config.hook_args) | {"sglang_server_flags": config.sglang_server_flags}


def changed_flags(config: Config, before: Mapping[str, Any]) -> list[str]:
    """Where `config` differs from `before`, its `flag_values` of an earlier run as JSON keeps them: "--lr 0.1 -> 0.2".

    --load is left out: every resumed run has it.
    """
    now = json.loads(json.dumps(flag_values(config)))
    return [
        f"{'--sglang-*' if name == 'sglang_server_flags' else flags.option_name(name)} {before[name]} -> {value}"
        for name, value in now.items()
        if name != "load" and name in before and before[name] != value
    ]
