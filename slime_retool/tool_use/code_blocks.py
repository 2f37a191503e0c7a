r"""Finds the code blocks in one turn of the ReTool format: `<code>`, a fenced block, `</code>`.

    <code>
    ```python
    print(6 * 7)
    ```
    </code>

A block ends at a fence on a line of its own with `</code>` behind it, so code may contain either of the two. Nothing
that the model wrote is evaluated, and nothing here raises.
"""

from __future__ import annotations

import re

from slime_retool.tool_use.calls import MAX_CALLS, TOO_MANY, ToolCallError

OPEN, CLOSE = "<code>", "</code>"
# Messages spell no tag out: in an observation it would be neutralised, like any other.
FORM = "Between the opening and the closing code tag write only a fenced block: ```python, the code, ```."
_FENCE = re.compile(r"\s*```[ \t]*(?:python3?|py)?[ \t]*\r?\n", re.IGNORECASE)
# Without the fence the tag still ends the block when it is alone on its line: it is no part of a string in the code.
_END = re.compile(r"^[ \t]*(?P<fence>```\s*)?</code>", re.MULTILINE)


def parse_code_blocks(text: str) -> tuple[list[str | ToolCallError], bool]:
    """All code of `text`, in order, and whether the text ends inside a block whose fence is still open.

    Of more than `MAX_CALLS` blocks the rest is one `ToolCallError`.
    """
    blocks: list[str | ToolCallError] = []
    position = 0
    while (start := text.find(OPEN, position)) >= 0:
        if len(blocks) == MAX_CALLS:
            return [*blocks, TOO_MANY], False
        start += len(OPEN)
        fence = _FENCE.match(text, start)
        if fence is None:
            problem, position = _no_fence(text, start)
            blocks.append(problem)
            continue
        end = _END.search(text, fence.end())
        if end is None:
            return blocks, True
        if end["fence"] is None:
            blocks.append(ToolCallError(f"Error: the code block has no closing fence before its closing tag. {FORM}"))
        else:
            blocks.append(text[fence.end() : end.start()])
        position = end.end()
    if text.find(CLOSE, position) >= 0:
        blocks.append(ToolCallError(f"Error: a code tag was closed that was not opened. {FORM}"))
    return blocks, False


def _no_fence(text: str, start: int) -> tuple[ToolCallError, int]:
    """What is wrong with a block that does not begin with a fence, and where to look on."""
    opening = text.find(OPEN, start)
    closing = text.find(CLOSE, start, opening if opening >= 0 else len(text))
    if closing >= 0:
        return ToolCallError(f"Error: the code is not in a fenced block. {FORM}"), closing + len(CLOSE)
    return ToolCallError(f"Error: a code tag was opened and no code block follows. {FORM}"), start
