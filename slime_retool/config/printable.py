"""A configuration as others may see it, without its secrets: flags for a shell, values for a tracker."""

from __future__ import annotations

import shlex
import sys
from typing import Any

from megatron_bridge import flags
from slime_retool.config.config import Config


def print_command_line(config: Config, prog: str) -> None:
    """Print the command line that makes `config`, for a shell; on stderr, which secrets it lacks."""
    print(" \\\n  ".join([f"python -m {prog}", *flag_lines(config)]))
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
    values = flags.public_values(config, *config.hook_args)
    return {
        "project": config.wandb_project,
        "group": config.wandb_group,
        "name": config.wandb_name,
        "mode": config.wandb_mode,
        "dir": config.output_dir,
        "config": values | {"sglang_server_flags": config.sglang_server_flags},
    }
