"""What every rank of a distributed test needs, imported once: `dist_utils` forks its ranks from a process with this."""

from __future__ import annotations

import pytest  # noqa: F401
from transformers import Qwen3ForCausalLM, Qwen3MoeForCausalLM  # noqa: F401

import slime_retool.trainer.imports  # noqa: F401
