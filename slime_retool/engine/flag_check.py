"""Whether SGLang takes the undeclared `--sglang-*` flags, asked in the background while the rest of a run starts.

with ServerFlagCheck(config) as check:
    ...  # what starts no trainer and no engine: Ray, tokenizer, data
    check.wait()
"""

from __future__ import annotations

import logging
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from slime_retool.config import Config
from slime_retool.config.engines import check_server_flags
from slime_retool.engine.process import SupervisedProcess
from slime_retool.engine.server import server_environment
from slime_retool.errors import ConfigError

logger = logging.getLogger(__name__)

# What SGLang prints while it is imported is nobody's concern: the log holds what its parser says, on stderr.
PARSE = """
import os, sys
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
import argparse
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser(prog="sglang.launch_server", allow_abbrev=False)
ServerArgs.add_cli_args(parser)
parser.parse_args(sys.argv[1:])
"""
PARSE_TIMEOUT = 180.0


class ServerFlagCheck(ExitStack[None]):
    """SGLang's own parser in a process of its own; importing it takes ten seconds and more.

    Nothing is started where there is nothing to ask: without such flags, and without engines of the run's own. The
    process ends with the `with` block, however that ends, and with this process.
    """

    def __init__(self, config: Config) -> None:
        """Start asking. Raises ConfigError for a flag that is not the user's to give (`check_server_flags`)."""
        super().__init__()
        check_server_flags(config)
        self._words = [word for name, values in config.sglang_server_flags.items() for word in (name, *values)]
        self._process: SupervisedProcess | None = None
        if not self._words or config.rollout_external_urls or config.num_engines == 0:
            return
        logger.info("asking SGLang whether it takes %s", " ".join(self._words))
        folder = self.enter_context(tempfile.TemporaryDirectory(prefix="slime-retool-"))
        self._process = self.enter_context(
            SupervisedProcess(
                [sys.executable, "-c", PARSE, "--model-path", "none", *self._words],
                log_path=Path(folder) / "flags.log",
                environment=server_environment(config, None),
                grace=1.0,
            )
        )

    def wait(self) -> None:
        """Return when SGLang takes the flags. Raises ConfigError when it does not, or does not answer."""
        if self._process is None:
            return
        status = self._process.wait(PARSE_TIMEOUT)
        if status is None:
            raise ConfigError(f"SGLang did not check its --sglang-* flags within {PARSE_TIMEOUT:g} s")
        if status:
            lines = self._process.log_tail().strip().splitlines() or ["no message"]
            raise ConfigError(f"SGLang refuses the --sglang-* flags {' '.join(self._words)}: {lines[-1]}")
        logger.info("SGLang takes the --sglang-* flags")
