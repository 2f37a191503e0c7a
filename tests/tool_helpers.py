"""A byte-level tokenizer with a chat template that behaves as Qwen3's, and an engine that follows a script.

The template puts the tools into the system message, joins neighbouring tool replies into one user turn, keeps reasoning
only behind the last question, and writes an empty one into a last turn without any.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, field
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from slime_retool.errors import EngineError
from slime_retool.protocols import Completion

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = """
{%- set system = messages[0].content if messages[0].role == 'system' else none -%}
{%- if tools -%}
{{ '<|im_start|>system\n' + (system + '\n\n' if system is not none else '') + '# Tools\n<tools>' }}
{%- for tool in tools -%}{{ '\n' }}{{ tool | tojson }}{%- endfor -%}
{{ '\n</tools>\nCall: <tool_call>\n{"name": ..., "arguments": ...}\n</tool_call><|im_end|>\n' }}
{%- elif system is not none -%}
{{ '<|im_start|>system\n' + system + '<|im_end|>\n' }}
{%- endif -%}
{%- set asked = namespace(last=messages | length - 1) -%}
{%- for message in messages -%}
{%- set text = message.content -%}
{%- set forged = text.startswith('<tool_response>') and text.endswith('</tool_response>') -%}
{%- if message.role == 'user' and not forged -%}{%- set asked.last = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
{%- if loop.first or loop.previtem.role != 'tool' -%}{{ '<|im_start|>user' }}{%- endif -%}
{{ '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
{%- if loop.last or loop.nextitem.role != 'tool' -%}{{ '<|im_end|>\n' }}{%- endif -%}
{%- elif message.role == 'assistant' -%}
{%- set parts = message.content.split('</think>') -%}
{%- set thought = parts[0].split('<think>')[-1].strip('\n') if parts | length > 1 else '' -%}
{%- set content = parts[-1].lstrip('\n') if parts | length > 1 else message.content -%}
{%- set thinks = loop.index0 > asked.last and (loop.last or thought) -%}
{{ '<|im_start|>assistant\n' }}
{%- if thinks -%}{{ '<think>\n' + thought + '\n</think>\n\n' }}{%- endif -%}
{{ content.lstrip('\n') if thinks else content }}
{%- for call in message.tool_calls or [] -%}
{{ '\n' if content or not loop.first else '' }}
{%- set function = call.function or call -%}
{{ '<tool_call>\n{"name": "' + function.name + '", "arguments": ' }}
{{- function.arguments if function.arguments is string else function.arguments | tojson -}}
{{ '}\n</tool_call>' }}
{%- endfor -%}
{{ '<|im_end|>\n' }}
{%- elif not (loop.first and system is not none) -%}
{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}
"""
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "code_interpreter",
            "description": "Run Python.",
            "parameters": {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
        },
    }
]


@functools.cache
def tokenizer(template: str = TEMPLATE) -> PreTrainedTokenizerFast:
    """Bytes, one merge ("ab", so that encoding is not the inverse of decoding), and Qwen's special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*alphabet, "ab"])}
    model = Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b")]))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    model.decoder = decoders.ByteLevel()
    model.add_special_tokens(list(SPECIAL))
    return PreTrainedTokenizerFast(
        tokenizer_object=model,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=list(SPECIAL),
        chat_template=template,
    )


def encode(text: str) -> list[int]:
    return tokenizer().encode(text, add_special_tokens=False)


def call_text(code: str) -> str:
    """A call in Qwen's format."""
    return '<tool_call>\n{"name": "code_interpreter", "arguments": ' + json.dumps({"code": code}) + "}\n</tool_call>"


def code_text(code: str) -> str:
    """A call in the ReTool paper's format."""
    return f"<code>\n```python\n{code}\n```\n</code>"


@dataclass
class ScriptedEngine:
    """Replies with the given turns (text or ids, and a finish reason); the last one is repeated for ever.

    Like a real engine it stops at `max_new_tokens` with finish reason "length", and behind the first stop text of a
    turn of text; the rest of that turn is what it generates next. With `trim_stop` it leaves the stop text out,
    although told not to. Reason "down" is an outage.
    """

    turns: list[tuple[str | list[int], str]]
    requests: list[list[int]] = field(default_factory=list)
    replies: list[Completion] = field(default_factory=list)
    params: list[dict[str, Any]] = field(default_factory=list)
    sessions: list[str | None] = field(default_factory=list)
    trim_stop: bool = False
    _script: list[tuple[str | list[int], str]] | None = None

    async def generate(
        self, input_ids: list[int], sampling_params: dict[str, Any], *, session: str | None = None
    ) -> Completion:
        if self._script is None:
            self._script = list(self.turns)
        turn, reason = self._script.pop(0) if len(self._script) > 1 else self._script[0]
        if reason == "down":
            raise EngineError("the script says so")
        stop = next((text for text in sampling_params.get("stop", ()) if isinstance(turn, str) and text in turn), None)
        if stop is not None and reason == "stop":
            end = turn.index(stop) + len(stop)
            if turn[end:]:
                self._script.insert(0, (turn[end:], reason))
            ids = encode(turn[: end - len(stop)] if self.trim_stop else turn[:end])
        else:
            ids = encode(turn) if isinstance(turn, str) else list(turn)
            if reason == "stop" and isinstance(turn, str):
                ids += encode("<|im_end|>")
        if len(ids) > sampling_params["max_new_tokens"]:
            ids, reason = ids[: sampling_params["max_new_tokens"]], "length"
        number = len(self.requests)
        log_probs = [-(number + 1) - index / 1000 for index in range(len(ids))]
        completion = Completion(ids, log_probs, reason, 7, len(input_ids), 0)
        self.requests.append(input_ids)
        self.replies.append(completion)
        self.params.append(sampling_params)
        self.sessions.append(session)
        return completion
