"""Configuration of a run: declared in `groups`, parsed, resolved and checked here. Imports no torch."""

from megatron_bridge.flags import flag
from slime_retool.config.config import Config
from slime_retool.config.parse import parse_config
from slime_retool.config.resolve import resolve
from slime_retool.config.validate import validate

__all__ = ["Config", "flag", "parse_config", "resolve", "validate"]
