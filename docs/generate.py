"""Write docs/flags.md and docs/metrics.md from the code: `python docs/generate.py` (`make docs` does it first)."""

from __future__ import annotations

import argparse
import dataclasses
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from megatron_bridge.flags import FlagSpec, flags_of, groups_of, option_name
from slime_retool.cli import COMMANDS
from slime_retool.config import Config
from slime_retool.metric_table import GROUPS

DOCS = Path(__file__).parent
MADE = "<!-- Written by docs/generate.py. -->\n"


class Asked(Exception):
    """Carries the parser whose --help was asked for."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self.parser = parser


def parser_of(function: str) -> argparse.ArgumentParser:
    """The argument parser of a command, given as `package.module:main`."""

    def caught(parser: argparse.ArgumentParser, file: object = None) -> None:
        raise Asked(parser)

    with mock.patch.object(argparse.ArgumentParser, "print_help", caught):
        try:
            pkgutil.resolve_name(function)(["--help"])
        except Asked as asked:
            return asked.parser
    raise AssertionError(f"{function} has no --help")


def cell(text: str) -> str:
    """`text` within a table's cell."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def shown(value: object) -> str:
    """A flag's default, as it would be written; empty where there is none."""
    if value is None or value == [] or value is False:
        return ""
    return "on" if value is True else f"`{' '.join(map(str, value)) if isinstance(value, list) else value}`"


def flags_page() -> str:
    """Every flag of every command."""
    lines = [
        MADE, "# Flags", "",
        "Every option is declared once, as a field of a dataclass in `slime_retool/config/groups.py` (models: "
        "`megatron_bridge/model_config.py`); the command line, `--help`, this page and the checks come from there. "
        "Hooks add [flags of their own](extending.md).", "",
        "Flags that begin with `--sglang-` are handed to every SGLang server with that prefix taken off: "
        "`--sglang-mem-fraction-static 0.7`. They are checked by SGLang's own parser before anything starts. Some "
        "of the tables below are the run's own, and those that follow from other flags are refused.", "",
        "## slime-retool train", "",
        "`python -m slime_retool.train` is the same. [`slime-retool eval`](#slime-retool-eval) and "
        "[`slime-retool plan`](#slime-retool-plan) take these flags too.", "",
    ]  # fmt: skip
    for group in groups_of(Config):
        title, _, about = (group.__doc__ or group.__name__).strip().partition("\n")
        lines += [f"### {title.rstrip('.')}", "", *([" ".join(about.split()), ""] if about.strip() else [])]
        lines += ["| flag | default | |", "|---|---|---|"]
        lines += [*(flag_line(field, spec, default) for field, spec, default in flags_of(group)), ""]
    for name, (function, purpose) in COMMANDS.items():
        if name != "train":
            lines += command_section(name, function, purpose)
    return "\n".join(lines).rstrip() + "\n"


def flag_line(field: dataclasses.Field, spec: FlagSpec, default: object) -> str:
    """One row of a group's table."""
    names = ", ".join(f"`{name}`" for name in (option_name(field.name), *spec.aliases))
    rules = [f"one of {', '.join(f'`{choice}`' for choice in spec.choices)}"] if spec.choices else []
    rules += [spec.bounds] if spec.bounds else []
    rule = f" ({'; '.join(rules)})" if rules else ""
    return f"| {names} | {shown(default)} | {cell(spec.help)}{rule} |"


def command_section(name: str, function: str, purpose: str) -> Iterator[str]:
    """A command's arguments; of one that takes all flags of training, those that its --help tells of by name only."""
    yield from (f"## slime-retool {name}", "", f"{purpose[0].upper()}{purpose[1:]}.", "")
    actions = [action for action in parser_of(function)._actions if action.dest != "help"]
    trained = {option_name(field.name) for group in groups_of(Config) for field, _, _ in flags_of(group)}
    takes_all = trained <= {option for action in actions for option in action.option_strings}
    told = [action for action in actions if action.help is not argparse.SUPPRESS]
    own = [action for action in told if not (takes_all and trained & set(action.option_strings))]
    if own:
        yield from ("| argument | default | |", "|---|---|---|", *map(argument_line, own), "")
    if takes_all:
        read = ", ".join(f"`{action.option_strings[0]}`" for action in told if action not in own)
        of_them = f", and reads {read}" if read else ""
        yield from (f"It takes [all flags of training](#slime-retool-train){of_them}.", "")


def argument_line(action: argparse.Action) -> str:
    """One row of a command's table."""
    names = ", ".join(f"`{name}`" for name in action.option_strings or [action.metavar or action.dest])
    default = "" if action.default in (argparse.SUPPRESS, ()) else shown(action.default)
    choices = f" (one of {', '.join(f'`{choice}`' for choice in action.choices)})" if action.choices else ""
    text = re.sub(r" ?\(default: %\(default\)s\)", "", action.help or "")
    return f"| {names} | {default} | {cell(text)}{choices} |"


def metrics_page() -> str:
    """Every metric."""
    lines = [
        MADE, "# Metrics", "",
        "What a run writes to `metrics.jsonl` in its `--output-dir`, and to TensorBoard and W&B where asked for. A "
        "step has several lines in the file, in the order in which its figures were known; "
        "`slime_retool.metrics.read_metrics` merges them, and so does "
        '`pandas.read_json(file, lines=True).groupby("step").last()`. Step -1 is before any training. A metric that '
        "a run has no use for is absent. The table is `slime_retool/metric_table.py`.", "",
    ]  # fmt: skip
    for group in GROUPS:
        lines += [f"## {group.title}", "", group.about, "", "| metric | |", "|---|---|"]
        lines += [f"| `{metric.name}` | {cell(metric.meaning)} |" for metric in group.metrics]
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


PAGES = {"flags.md": flags_page, "metrics.md": metrics_page}


def main() -> None:
    """Write the pages that differ."""
    for name, page in PAGES.items():
        path, text = DOCS / name, page()
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(f"wrote {path}")


if __name__ == "__main__":
    main()
