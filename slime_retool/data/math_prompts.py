"""The instruction that asks for the answer form which the reward reads, put on and taken off a math question."""

from __future__ import annotations

import re

INSTRUCTION = (
    "Think step by step and run Python code wherever it helps. "
    "End with a line of the form Answer: \\boxed{x}, where x is the final answer and nothing else."
)

# What published sets wrap around a question; each asks for an answer form of its own.
_WRAPPERS = (
    re.compile(r"^\s*Solve the following math problem step by step\..{0,200}?answer to the problem\.\s*", re.DOTALL),
    re.compile(r"\s*Remember to put your answer on its own line after \"Answer:\"\.?\s*$"),
    re.compile(r"\s*<answer>\s*\\boxed\{.{0,80}?\}\s*</answer>\s*$", re.DOTALL),
    re.compile(r"\s*(?:The answer format must be:|Let's think step by step.{0,60}within)\s*\\boxed\{.{0,80}?\}\.?\s*$"),
)


def bare_question(text: str) -> str:
    """The question alone: published instructions about the answer's form, and ours, are removed."""
    text = text.strip().removesuffix(INSTRUCTION)
    for wrapper in _WRAPPERS:
        text = wrapper.sub("", text)
    return text.strip()


def with_instruction(question: str) -> str:
    """The user message of SFT and RL rows alike: the bare question, then `INSTRUCTION`."""
    return f"{bare_question(question)}\n\n{INSTRUCTION}"
