"""The command line of a run: the product's flags, those of its hooks, and --sglang-* ones for the servers.

The module of a hook may declare flags of its own, as a frozen dataclass that it calls `HookArgs`:

    @dataclass(frozen=True)
    class HookArgs:
        '''My task.'''
        bonus: float = flag(0.5, min=0, help="Added to a right answer.")

    async def reward_func(args, sample, **kwargs):
        return args.hook(HookArgs).bonus + ...

`--custom-rm-path my_task.reward_func --bonus 1` sets it; --help, --dry-run and the bounds are as for other flags.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence

from megatron_bridge import flags
from slime_retool.config.config import HOOK_PATHS, Config
from slime_retool.errors import ConfigError
from slime_retool.protocols import load_module


class TrainParser(flags.OneLineParser):
    """Takes the flags of `Config`; those of hooks are added when the arguments that name the hooks are known."""

    def __init__(self, prog: str, usage: str, description: str) -> None:
        super().__init__(prog=prog, usage=usage, description=description)
        flags.add_flags(self, Config)

    def parse_args(self, args: Sequence[str] | None = None, namespace: object = None) -> argparse.Namespace:
        """Like argparse's, for one command line: also collects undeclared --sglang-* flags for the servers.

        Raises ConfigError for a hook that cannot be imported, and for flags of hooks that cannot be added.
        """
        args = sys.argv[1:] if args is None else args
        modules, classes = self._hooks(args)
        for cls in classes:
            self._add_hook(cls)
        parsed, unknown = self.parse_known_args(args, namespace)
        parsed.hook_args = tuple(flags.from_namespace(cls, parsed) for cls in classes)
        parsed.sglang_server_flags = server = {}
        current: list[str] | None = None
        for token in unknown:
            if token.startswith("--sglang-"):
                name, equals, value = token.partition("=")
                current = [value] if equals else []
                server["--" + name.removeprefix("--sglang-")] = current
            elif token.startswith("--") or current is None:
                self.error(flags.unknown_flag_message(self, token) + _hint_at_hooks(token, modules))
            else:
                current.append(token)
        return parsed

    def _hooks(self, args: Sequence[str]) -> tuple[list[str], list[type]]:
        """The modules that the hooks' paths in `args` name, and the `HookArgs` in them."""
        parser = flags.OneLineParser(prog=self.prog, add_help=False)
        for name in HOOK_PATHS:
            parser.add_argument(flags.option_name(name), dest=name)
        given = [(name, path) for name, path in vars(parser.parse_known_args(args)[0]).items() if path is not None]
        modules = {load_module(path, flags.option_name(name)): None for name, path in given}
        found = {module.__dict__["HookArgs"]: None for module in modules if "HookArgs" in module.__dict__}
        return [module.__name__ for module in modules], list(found)

    def _add_hook(self, cls: type) -> None:
        name = f"{cls.__module__}.{cls.__qualname__}"
        if not flags.is_frozen_group(cls):
            raise ConfigError(f"{name} must be a frozen dataclass, and each of its fields a flag(...)")
        try:
            flags.add_flags(self, cls)
        except argparse.ArgumentError as error:
            raise ConfigError(f"{name}: {error}; give its field another name") from None


def _hint_at_hooks(token: str, modules: Iterable[str]) -> str:
    if not token.startswith("--"):
        return ""
    hooks = ", ".join(modules)
    return f"; no hook declares it (HookArgs of {hooks})" if hooks else "; a hook's own flags need the hook's path"


def build_parser(
    prog: str = "slime_retool.train",
    *,
    usage: str = "python -m slime_retool.train --hf-checkpoint DIR --prompt-data FILE [--FLAG VALUE ...]",
    description: str = "Teach a language model to reason with tools: SFT and RL on Megatron-core and SGLang.",
) -> TrainParser:
    """The parser behind `python -m slime_retool.train --help`, and of the commands that take its flags."""
    return TrainParser(prog, usage, description)


def parse_config(argv: Sequence[str] | None = None, parser: TrainParser | None = None) -> Config:
    """Parse flags into a `Config`; exits with code 2 and one line on a mistake. Values are checked by `validate`.

    Raises ConfigError for hooks' modules that cannot be used.
    """
    return flags.from_namespace(Config, (parser or build_parser()).parse_args(argv))
