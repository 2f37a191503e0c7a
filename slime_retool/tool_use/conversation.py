r"""Turns a conversation into token ids, piece by piece, without ever encoding model output again.

    prompt ids          the whole prompt through the chat template, once
    turn ids            as the engine returned them
    observation ids     what the template writes between the end of one assistant turn and the next

    <|im_start|>assistant\n                                                     end of the prompt
    <tool_call>...</tool_call><|im_end|>                                        turn
    \n<|im_start|>user\n<tool_response>...<|im_end|>\n<|im_start|>assistant\n     observation

Observation ids are cut out of a dummy conversation, rendered by the template itself: the suffix after the
assistant turn's end token. So templates that change earlier turns (dropping their reasoning) work as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slime_retool.errors import ConfigError
from slime_retool.tool_use.observation import ObservationFilter
from slime_retool.types import Message, ToolSchema

# Words that no template contains by itself.
_CALL_MARK, _RESULT_MARK, _SCHEMA_MARK = "qzcallqz", "qzresultqz", "qzschemaqz"


class ConversationRenderer:
    """Renders prompts and observations for one tokenizer and one set of tools.

    Raises ConfigError when the tokenizer's chat template cannot carry tool calls (see `check_template`).
    """

    def __init__(self, tokenizer: Any, tools: Sequence[ToolSchema]) -> None:
        check_template(tokenizer)
        self.tools = list(tools)
        self._tokenizer = tokenizer
        self._filter = ObservationFilter(tokenizer)
        self._end_token = _end_token(tokenizer)
        self.end_token_id: int = tokenizer.convert_tokens_to_ids(self._end_token)

    def prompt_ids(self, prompt: list[Message] | str) -> list[int]:
        """Ids of the prompt, ready for generation; a string is taken as already rendered."""
        if not isinstance(prompt, str):
            prompt = _render(self._tokenizer, prompt, self.tools, add_generation_prompt=True)
        return self._encode(prompt)

    def text(self, ids: Sequence[int]) -> str:
        """Text of a turn, for parsing and reading only: without the end token."""
        text = self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text.removesuffix(self._end_token)

    def fit_observation(self, text: str, max_tokens: int) -> str:
        """Tool output neutralised and cut to a token budget (see `ObservationFilter`)."""
        return self._filter.fit(self._filter.clean(text), max_tokens)

    def observation_ids(self, observations: Sequence[str], after_ids: Sequence[int]) -> list[int]:
        """The ids to append after an assistant turn: all its observations and the next generation prompt.

        `after_ids`: what comes before. When the turn did not end with the template's end token (a stop text, another
        end token), the end token comes first. Observations must have passed `fit_observation`.
        """
        suffix = _suffix(self._tokenizer, self.tools, observations, self._end_token)
        # Encoded behind the end token, as in the whole conversation; a special token is a boundary for the tokenizer.
        ids = self._encode(self._end_token + suffix)
        assert ids[0] == self.end_token_id
        return ids[1:] if after_ids and after_ids[-1] == self.end_token_id else ids

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))


def check_template(tokenizer: Any) -> None:
    """Refuse a chat template with which a tool conversation cannot be written.

    Raises ConfigError when there is no template, or when it shows the model no tool schema, drops the calls of an
    assistant turn, drops tool results or their order, or ends a turn without a special token.
    """
    if not tokenizer.chat_template:
        raise ConfigError("the tokenizer has no chat template; a tool recipe needs one: use an instruct tokenizer")
    schema: ToolSchema = {
        "type": "function",
        "function": {
            "name": "probe",
            "description": _SCHEMA_MARK,
            "parameters": {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
        },
    }
    try:
        shown = _render(tokenizer, [{"role": "user", "content": "x"}], [schema], add_generation_prompt=True)
        messages = _dummy([_RESULT_MARK + "1", _RESULT_MARK + "2"])
        conversation = _render(tokenizer, messages, None, add_generation_prompt=True)
    except Exception as error:  # templates raise errors of their own
        raise ConfigError(f"the chat template cannot render a tool conversation: {error}") from error
    rules = {
        "does not show the model the schema of its tools": _SCHEMA_MARK in shown,
        "drops the tool calls of an assistant turn": _CALL_MARK in conversation,
        "drops messages of role tool, or their order": (
            0 <= conversation.find(_RESULT_MARK + "1") < conversation.find(_RESULT_MARK + "2")
        ),
    }
    for problem, kept in rules.items():
        if not kept:
            raise ConfigError(f"the chat template {problem}; use a tokenizer whose template supports tools")
    _end_token(tokenizer)


def _dummy(observations: Sequence[str]) -> list[Message]:
    call = {
        "type": "function",
        "id": "call00001",
        "function": {"name": "probe", "arguments": {"code": _CALL_MARK}},
    }
    results = [{"role": "tool", "name": "probe", "tool_call_id": "call00001", "content": text} for text in observations]
    return [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        *results,
    ]


def _render(
    tokenizer: Any, messages: list[Message], tools: list[ToolSchema] | None, *, add_generation_prompt: bool
) -> str:
    return tokenizer.apply_chat_template(
        messages, tools=tools or None, add_generation_prompt=add_generation_prompt, tokenize=False
    )


def _end_token(tokenizer: Any) -> str:
    """The special token with which the template ends an assistant turn that calls a tool."""
    text = _render(tokenizer, _dummy([]), None, add_generation_prompt=False)
    behind = text[text.rindex(_CALL_MARK) + len(_CALL_MARK) :]
    found = [(at, token) for token in tokenizer.all_special_tokens if (at := behind.find(token)) >= 0]
    if not found:
        raise ConfigError(
            "the chat template must end an assistant turn with a special token of the tokenizer (such as <|im_end|>), "
            f"got {behind!r}"
        )
    return min(found)[1]


def _suffix(tokenizer: Any, tools: list[ToolSchema], observations: Sequence[str], end_token: str) -> str:
    """What the template writes after the end token of an assistant turn that called tools."""
    text = _render(tokenizer, _dummy(observations), tools, add_generation_prompt=True)
    return text[text.index(end_token, text.index(_CALL_MARK)) + len(end_token) :]
