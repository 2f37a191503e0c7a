"""Teach language models to reason with tools: SFT and RL on released Megatron-core and SGLang."""

__version__ = "0.1.0"
