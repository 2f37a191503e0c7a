"""Whether a response keeps to the form that the recipe asks for."""

from __future__ import annotations

from slime_retool.reward.boxed import TAGS, last_boxed, without_open_thought, without_tool_text

MAX_TAIL = 300
"""Characters that may follow the box: the window of the published rule."""


def format_score(response: str) -> float:
    r"""1.0 for a well-formed response, else 0.0.

    Well-formed: every tool tag is paired, and the model's own words end in one \boxed{...} answer, which stands behind
    the last tool output, with little text after it.
    """
    spoken = without_open_thought(without_tool_text(response))
    if any(f"<{tag}>" in spoken or f"</{tag}>" in spoken for tag in TAGS):
        return 0.0
    last_output = max(response.rfind(f"</{tag}>") for tag in TAGS)
    box = spoken.find("\\boxed")
    well_formed = spoken.count("\\boxed") == 1 and box > last_output and last_boxed(spoken[box:])
    return 1.0 if well_formed and len(spoken.rstrip()) - box <= MAX_TAIL else 0.0
