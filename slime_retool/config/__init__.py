"""Configuration of a run: declared in `groups`, parsed and checked here. Imports no torch."""

from slime_retool.config.config import Config, parse_config
from slime_retool.config.validate import resolve_device, validate

__all__ = ["Config", "parse_config", "resolve_device", "validate"]
