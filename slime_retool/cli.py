"""`slime-retool COMMAND`: the table of commands. Each is a module of its own, imported when it is called."""

from __future__ import annotations

import difflib
import os
import pkgutil
import sys
from collections.abc import Iterable, Sequence

from slime_retool import __doc__ as PURPOSE
from slime_retool import __version__
from slime_retool.errors import refuse

PROG = "slime-retool"
COMMANDS = {
    "train": ("slime_retool.train:main", "train a model, SFT or RL; the same as python -m slime_retool.train"),
    "eval": ("slime_retool.commands.eval:main", "measure a checkpoint, or a model behind an API"),
    "plan": ("slime_retool.commands.plan.command:main", "memory and time of a run, from its flags alone"),
    "data check": ("slime_retool.commands.data_check:main", "whether data files can be used, row by row"),
    "view": ("slime_retool.commands.viewer.command:main", "read samples as text, or make a page of a run"),
    "doctor": ("slime_retool.commands.doctor:main", "what this host has of what a run needs"),
    "sandbox serve": ("slime_retool.commands.sandbox_serve:main", "the sandbox as a service that speaks /run_code"),
    "convert to-megatron": ("slime_retool.commands.convert:to_megatron", "Hugging Face checkpoint to torch_dist"),
    "convert flags": ("slime_retool.commands.convert:model_flags", "Megatron flags of a Hugging Face checkpoint"),
    "convert init-tokens": (
        "slime_retool.commands.convert:init_tokens",
        "rows for tokens that a Hugging Face checkpoint was never trained on",
    ),
    "convert to-hf": ("slime_retool.commands.convert:to_hf", "torch_dist checkpoint to Hugging Face"),
}
"""Name -> (function that takes the other arguments and returns the exit code, what it is for)."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit code."""
    if os.getcwd() not in (os.path.abspath(folder) for folder in sys.path):
        sys.path.insert(0, os.getcwd())  # as `python -m` does: a hook's file may lie where the command is given
    try:
        return _run(list(sys.argv[1:] if argv is None else argv))
    except BrokenPipeError:  # `| head` has seen enough; nothing is left for the interpreter to write on its way out
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _run(arguments: list[str]) -> int:
    for words in (2, 1):
        name = " ".join(arguments[:words])
        if name in COMMANDS:
            function, _ = COMMANDS[name]
            return pkgutil.resolve_name(function)(arguments[words:])
    first, *rest = arguments or ["--help"]
    family = [name for name in COMMANDS if name.startswith(f"{first} ")]
    if first == "--version":
        print(f"{PROG} {__version__}")
        return 0
    if first in ("-h", "--help") or (family and set(rest) <= {"-h", "--help"}):
        print(_page(family or COMMANDS))
        return 0 if {"-h", "--help"} & set(arguments) else 2
    unknown = " ".join(arguments[:2]) if family else first
    near = difflib.get_close_matches(unknown, COMMANDS, n=1)
    hint = f"; did you mean `{PROG} {near[0]}`?" if near else f"; see `{PROG} --help`"
    return refuse(PROG, f"unknown command {unknown!r}{hint}")


def _page(names: Iterable[str]) -> str:
    lines = [f"  {name:<21}{COMMANDS[name][1]}" for name in names]
    return "\n".join([
        f"usage: {PROG} COMMAND [--FLAG VALUE ...]", "", PURPOSE, "", "commands:", *lines, "",
        f"`{PROG} COMMAND --help` lists a command's flags, `{PROG} --version` prints the version.",
    ])  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
