r"""The format of the ReTool paper (Feng et al., "ReTool: Reinforcement Learning for Strategic Tool Use in LLMs", 2025).

    turn          <code>\n```python\nprint(6 * 7)\n```\n</code>          the engine stops at the closing tag
    observation   \n<interpreter>\n42\n</interpreter>\n                  in the same assistant message
    last turn     ... <answer>\boxed{42}</answer><|im_end|>

The chat template sees no tools: the system message explains the format (`instruction`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slime_retool.chat import TURN_MARK, ChatTemplate
from slime_retool.errors import ConfigError
from slime_retool.tool_use.calls import ToolCall, ToolCallError, Turn
from slime_retool.tool_use.code_blocks import CLOSE, FORM, OPEN, parse_code_blocks
from slime_retool.tool_use.observation import ObservationFilter
from slime_retool.tool_use.suffix import TEXT_MARK, SuffixFrame
from slime_retool.types import Message, ToolSchema

_ADVICE = "use --tool-format qwen, or a tokenizer whose template shows a system message"
_INSTRUCTION = r"""You can run Python code while you work on a problem. Write it as a fenced block between code tags:

<code>
```python
print(6 * 7)
```
</code>

Every block is a whole program. It is run as soon as it is closed, and its output is put behind it:

<interpreter>
42
</interpreter>

Then go on from there, with further blocks where they help. Never write an interpreter tag yourself.
End with your final answer: <answer>\boxed{...}</answer>"""


class RetoolFormat:
    """A `ToolFormat`.

    Raises ConfigError unless there is one tool with one required argument, a string (it gets the code), and when the
    chat template shows no system message.
    """

    stop: tuple[str, ...] = (CLOSE,)
    marks: tuple[str, ...] = (OPEN, CLOSE, "<interpreter>", "</interpreter>", "<answer>", "</answer>")

    def __init__(self, tokenizer: Any, tools: Sequence[ToolSchema]) -> None:
        self.tool, self.argument = _code_tool(tools)
        self._instruction = instruction(tools)
        self.template = ChatTemplate(tokenizer)
        _check_system_message(self.template)
        self._filter = ObservationFilter(tokenizer)
        self._suffix = SuffixFrame(self.template, _conversation)

    def prompt_ids(self, prompt: list[Message] | str) -> list[int]:
        if not isinstance(prompt, str):
            prompt = _with_instruction(prompt, self._instruction)
        return self.template.prompt_ids(prompt)

    def text(self, ids: Sequence[int]) -> str:
        return self.template.decode_without_end(ids)

    def read_turn(self, ids: Sequence[int]) -> Turn:
        """An open block means: the engine trimmed the stop text, or stopped at one that is part of the code, or the
        model ended its message there. The last id tells the last case."""
        text = self.template.codec.decode(ids)
        if bool(ids) and ids[-1] in self.template.special_ids:
            blocks, unclosed = parse_code_blocks(text)
            if unclosed:
                blocks.append(ToolCallError(f"Error: the code block is not closed. {FORM}"))
            missing = "" if ids[-1] == self.template.end_token_id else self.template.end_token
            return Turn(text, self._calls(blocks), missing=missing)
        missing = CLOSE if _is_open(text) and not self._stop_text_is_there(text, ids) else ""
        blocks, unclosed = parse_code_blocks(text + missing)
        return Turn(text, self._calls(blocks), unfinished=unclosed, over=False, missing=missing)

    def fit_observation(self, text: str, max_tokens: int) -> str:
        return self._filter.fit(self._filter.clean(text), max_tokens)

    def observation_ids(self, observations: Sequence[str], turn: Turn) -> list[int]:
        """Usually text inside the assistant message; behind a message that the model ended, a message of the user."""
        if turn.over:
            return self._suffix.behind(turn, observations)
        shown = _shown(observations)
        begin = "\n" if shown and not (turn.text + turn.missing).endswith("\n") else ""
        return self.template.codec.encode(turn.missing + begin + shown)

    def _stop_text_is_there(self, text: str, ids: Sequence[int]) -> bool:
        """Whether the last id completed the stop text; it may hold characters behind it."""
        end = text.rfind(CLOSE) + len(CLOSE)
        return text.endswith(CLOSE) or (CLOSE in text and end > len(self.template.codec.decode(ids[:-1])))

    def _calls(self, blocks: Sequence[str | ToolCallError]) -> list[ToolCall | ToolCallError]:
        return [
            block if isinstance(block, ToolCallError) else ToolCall(self.tool, {self.argument: block})
            for block in blocks
        ]

def instruction(tools: Sequence[ToolSchema]) -> str:
    """What the system message says about the format, with the tool's own description."""
    description = tools[0]["function"].get("description") or ""
    return f"{_INSTRUCTION}\n\nAbout the interpreter: {description}" if description else _INSTRUCTION


def _code_tool(tools: Sequence[ToolSchema]) -> tuple[str, str]:
    """Name of the one tool and of the argument that gets the code."""
    if len(tools) == 1:
        function = tools[0]["function"]
        parameters = function.get("parameters") or {}
        required = parameters.get("required") or []
        if len(required) == 1 and parameters["properties"][required[0]].get("type") == "string":
            return function["name"], required[0]
    names = ", ".join(tool["function"]["name"] for tool in tools) or "none"
    raise ConfigError(
        "--tool-format retool can write calls of one tool with one required argument, a string for the code; "
        f"the tools are: {names}. Use --tool-format qwen, or offer one such tool"
    )


def _with_instruction(prompt: list[Message], text: str) -> list[Message]:
    if prompt and prompt[0]["role"] == "system":
        return [{**prompt[0], "content": f"{prompt[0]['content']}\n\n{text}"}, *prompt[1:]]
    return [{"role": "system", "content": text}, *prompt]


def _check_system_message(template: ChatTemplate) -> None:
    messages = _with_instruction([{"role": "user", "content": "x"}], TEXT_MARK)
    try:
        shown = template.render(messages)
    except Exception as error:  # templates raise errors of their own
        raise ConfigError(f"the chat template cannot render a system message: {error}; {_ADVICE}") from error
    if TEXT_MARK not in shown:
        raise ConfigError(
            f"the chat template drops the system message, where --tool-format retool is explained; {_ADVICE}"
        )


def _is_open(text: str) -> bool:
    """Whether a block is still open at the end of `text`."""
    return parse_code_blocks(text)[1] or text.rfind(OPEN) > text.rfind(CLOSE)


def _shown(observations: Sequence[str]) -> str:
    return "".join(f"<interpreter>\n{text}\n</interpreter>\n" for text in observations)


def _conversation(observations: Sequence[str]) -> list[Message]:
    return [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": TURN_MARK},
        {"role": "user", "content": _shown(observations).removesuffix("\n")},
    ]
