"""The instruction that asks for the answer form which the reward reads, put on and taken off a math question."""

from __future__ import annotations

import re

from slime_retool.errors import ConfigError

_DAPO_BEFORE = (
    "Solve the following math problem step by step. The last line of your response should be of the form "
    "Answer: \\boxed{$Answer} where $Answer is the answer to the problem.\n\n"
)
_DAPO_AFTER = '\n\nRemember to put your answer on its own line after "Answer:".'
_SHORT_AFTER = (
    "\n\nThink step by step and run Python code wherever it helps. "
    "End with a line of the form Answer: \\boxed{x}, where x is the final answer and nothing else."
)
INSTRUCTIONS = {
    "dapo": (_DAPO_BEFORE, _DAPO_AFTER),
    "short": ("", _SHORT_AFTER),
    "none": ("", ""),
}
"""Name -> what stands before and after the question. `dapo` is the one that DAPO-Math-17k was published with, in the
boxed form of slime's copy."""

# What published sets wrap around a question; each asks for an answer form of its own.
_WRAPPERS = (
    re.compile(r"^\s*Solve the following math problem step by step\..{0,200}?answer to the problem\.\s*", re.DOTALL),
    re.compile(r"\s*Remember to put your answer on its own line after \"Answer:\"\.?\s*$"),
    re.compile(r"\s*<answer>\s*\\boxed\{.{0,80}?\}\s*</answer>\s*$", re.DOTALL),
    re.compile(r"\s*(?:The answer format must be:|Let's think step by step.{0,60}within)\s*\\boxed\{.{0,80}?\}\.?\s*$"),
)


def bare_question(text: str) -> str:
    """The question alone: published instructions about the answer's form, and ours, are removed."""
    text = text.strip().removesuffix(_SHORT_AFTER)
    for wrapper in _WRAPPERS:
        text = wrapper.sub("", text)
    return text.strip()


def with_instruction(question: str, instruction: str = "dapo") -> str:
    """The user message of SFT and RL rows alike: the bare question in one of `INSTRUCTIONS`.

    Raises ConfigError for an unknown one.
    """
    if instruction not in INSTRUCTIONS:
        raise ConfigError(f"the instruction must be one of {', '.join(INSTRUCTIONS)}, got {instruction!r}")
    before, after = INSTRUCTIONS[instruction]
    return f"{before}{bare_question(question)}{after}"
