"""The command line of a run: the product's flags, those of its hooks, and --sglang-* ones for the servers.

The module of a hook may declare flags of its own, as a frozen dataclass that it calls `HookArgs`:

    @dataclass(frozen=True)
    class HookArgs:
        '''My task.'''
        bonus: float = flag(0.5, min=0, help="Added to a right answer.")

    async def reward_func(args, sample, **kwargs):
        return args.hook(HookArgs).bonus + ...

`--custom-rm-path my_task.reward_func --bonus 1` sets it; --help, --dry-run and bounds are as for the product's flags.
The path of an estimator, a loss or a weight transport names such a module, too: trainers read the same values.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Container, Sequence
from types import ModuleType

from megatron_bridge import flags
from slime_retool.config.config import HOOK_PATHS, NAMES_OR_PATHS, Config
from slime_retool.errors import ConfigError
from slime_retool.protocols import load_module


class TrainParser(flags.OneLineParser):
    """Takes the flags of `Config`, and those of the hooks that the arguments name. For one command line."""

    def __init__(self, prog: str, usage: str | None, description: str, shown: Container[str] | None) -> None:
        super().__init__(prog=prog, usage=usage, description=description)
        flags.add_flags(self, Config, shown)

    def parse(self, argv: Sequence[str] | None = None) -> argparse.Namespace:
        """The fields of `Config`, and what was added to the parser beside them.

        Raises ConfigError for a hook's flags that cannot be added. A hook that cannot be imported adds none.
        """
        args = sys.argv[1:] if argv is None else argv
        modules, missing = self._hook_modules(args)
        classes = dict.fromkeys(module.__dict__["HookArgs"] for module in modules if "HookArgs" in module.__dict__)
        for cls in classes:
            self._add_hook(cls)
        parsed, unknown = self.parse_known_args(args)
        parsed.hook_args = tuple(flags.from_namespace(cls, parsed) for cls in classes)
        parsed.sglang_server_flags = server = {}
        current: list[str] | None = None
        for token in unknown:
            if token.startswith("--sglang-"):
                name, equals, value = token.partition("=")
                current = [value] if equals else []
                server["--" + name.removeprefix("--sglang-")] = current
            elif token.startswith("--"):
                names = ", ".join(module.__name__ for module in modules)
                hooks = f"no HookArgs of {names} declares it" if names else "a hook's own flags need the hook's path"
                self.error("; ".join([flags.unknown_flag_message(self, token), *(missing or [hooks])]))
            elif current is None:
                self.error(flags.unknown_flag_message(self, token))
            else:
                current.append(token)
        return parsed

    def _hook_modules(self, args: Sequence[str]) -> tuple[list[ModuleType], list[str]]:
        """The modules that the hooks' paths in `args` name; for those that cannot be imported, why not."""
        parser = flags.OneLineParser(prog=self.prog, add_help=False)
        for name in (*HOOK_PATHS, *NAMES_OR_PATHS):
            parser.add_argument(flags.option_name(name), dest=name)
        given, _ = parser.parse_known_args(args)
        modules: list[ModuleType] = []
        missing: list[str] = []
        for name, path in vars(given).items():
            if path is not None and ("." in path or name in HOOK_PATHS):
                try:
                    modules.append(load_module(path, flags.option_name(name)))
                except ConfigError as error:
                    missing.append(str(error))
        return list(dict.fromkeys(modules)), missing

    def _add_hook(self, cls: type) -> None:
        name = f"{cls.__module__}.{cls.__qualname__}"
        if not flags.is_frozen_group(cls):
            raise ConfigError(f"{name} must be a frozen dataclass, and each of its fields a flag(...)")
        try:
            flags.add_flags(self, cls)
        except argparse.ArgumentError as error:
            raise ConfigError(f"{name}: {error}; give its field another name") from None


def build_parser(
    prog: str = "slime_retool.train",
    *,
    usage: str | None = "python -m slime_retool.train --hf-checkpoint DIR --prompt-data FILE [--FLAG VALUE ...]",
    description: str = "Teach a language model to reason with tools: SFT and RL on Megatron-core and SGLang.",
    shown: Container[str] | None = None,
) -> TrainParser:
    """The parser behind `python -m slime_retool.train --help`, and of the commands that take its flags.

    It takes all of them; --help tells of the fields in `shown` (None: of all), and of hooks' own flags.
    """
    return TrainParser(prog, usage, description, shown)


def parse_config(argv: Sequence[str] | None = None, parser: TrainParser | None = None) -> Config:
    """Parse flags into a `Config`; exits with code 2 and one line on a mistake. Values are checked by `validate`.

    Raises ConfigError for a hook's flags that cannot be added.
    """
    return flags.from_namespace(Config, (parser or build_parser()).parse(argv))
