r"""Hooks that let a model solve a problem by one program: the raw material of SFT traces.

    slime-retool eval --custom-generate-function-path program_hooks.generate \
        --custom-rm-path program_hooks.reward_func ...

The model is asked, without any tool, for two sentences and a program (column `program` of questions.py's rows). The
program runs in the sandbox, and what it prints is the answer. The transcripts that `slime-retool eval` writes hold in
their metadata {thought, code, output}; `program_traces.py select` makes conversations with tool calls of the right
ones.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any

from slime_retool.config import Config
from slime_retool.recipes.retool.tool_sandbox import make_tools
from slime_retool.reward import check_label as check_label  # what `reward_func` needs of a data row
from slime_retool.reward import compute_score
from slime_retool.rollout.context import current_context
from slime_retool.rollout.generate import generate as generate_turn
from slime_retool.tool_use import ToolCall
from slime_retool.types import Sample

_PROGRAM = re.compile(r"^```(?:python|py)?[ \t]*\n(.*?)^```[ \t]*$", re.DOTALL | re.MULTILINE)
MAX_THOUGHT = 900
"""Characters before the program; longer ones are left out of a trace."""
MAX_OUTPUT = 200


def split_answer(text: str) -> tuple[str, str]:
    """(what stands before the first program, the program); two empty texts where there is none."""
    found = _PROGRAM.search(text)
    if found is None:
        return "", ""
    return thought_of(text[: found.start()]), found[1].strip("\n")


def thought_of(text: str) -> str:
    """The prose before a program, without headings and without a last line that only announces the program."""
    lines = [line.strip() for line in text.strip().splitlines() if line.strip() and not line.strip().startswith("#")]
    if lines and lines[-1].endswith(":"):
        # "To find x, we ... . Here is the program:" loses its last sentence.
        before, stop, _ = lines[-1].rpartition(". ")
        lines[-1:] = [before + stop.strip()] if before else []
    thought = "\n".join(lines)
    return thought if len(thought) <= MAX_THOUGHT else ""


async def generate(args: Config, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """One turn, and one run of the program in it. Raises what the engine and the sandbox raise for an outage."""
    sample = await generate_turn(args, sample, sampling_params)
    thought, code = split_answer(sample.response)
    output = ""
    if code:
        registry = await current_context().resource("tools", make_tools)
        result = await registry.execute(ToolCall("code_interpreter", {"code": code}))
        output = "" if result.is_error else result.text.strip()
    sample.metadata |= {"thought": thought, "code": code, "output": output}
    return sample


async def reward_func(args: Config, sample: Sample, **kwargs: Any) -> dict[str, Any]:
    """{"score", "acc", "pred"}: whether the printed text means the same as the label."""
    output = sample.metadata["output"]
    if not output or "\n" in output or len(output) > MAX_OUTPUT:
        return {"score": -1.0, "acc": False, "pred": ""}
    return await asyncio.to_thread(compute_score, f"\\boxed{{{output}}}", str(sample.label), "math_verify")
