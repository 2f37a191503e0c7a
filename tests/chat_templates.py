"""Chat templates of our own that write what those of three model families write."""

from __future__ import annotations

_TOOLS = r"""{{ '# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided' }}
{{- ' with function signatures within <tools></tools> XML tags:\n<tools>' }}
{%- for tool in tools %}{{ '\n' ~ (tool | tojson) }}{% endfor -%}
{{ '\n</tools>\n\nFor each function call, return a json object with function name and arguments within ' }}
{{- '<tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n' }}
{{- '</tool_call><|im_end|>\n' }}"""

_TOOL_TURN = r"""
{%- if loop.first or loop.previtem.role != 'tool' %}{{ '<|im_start|>user' }}{% endif -%}
{{ '\n<tool_response>\n' ~ m.content ~ '\n</tool_response>' }}
{%- if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\n' }}{% endif -%}"""

_CALL = r"""{{ '<tool_call>\n{"name": "' ~ call.function.name ~ '", "arguments": ' }}
{{- call.function.arguments | tojson ~ '}\n</tool_call>' }}"""

_PROMPT = r"""{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif -%}"""

# A default system message, and a line break before every call.
QWEN25 = (
    r"""{%- set default = 'You are Qwen, created by Alibaba Cloud. You are a helpful assistant.' -%}
{{- '<|im_start|>system\n' ~ (messages[0].content if messages[0].role == 'system' else default) }}
{%- if tools %}{{ '\n\n' }}"""
    + _TOOLS
    + r"""{% else %}{{ '<|im_end|>\n' }}{% endif -%}
{%- for m in messages -%}
{%- if m.role == 'tool' -%}"""
    + _TOOL_TURN
    + r"""
{%- elif m.role == 'assistant' and m.tool_calls -%}
{{ '<|im_start|>assistant' }}{% if m.content %}{{ '\n' ~ m.content }}{% endif -%}
{%- for call in m.tool_calls %}{{ '\n' }}"""
    + _CALL
    + r"""{% endfor -%}{{ '<|im_end|>\n' }}
{%- elif m.role != 'system' or not loop.first -%}
{{ '<|im_start|>' ~ m.role ~ '\n' ~ m.content ~ '<|im_end|>\n' }}
{%- endif -%}
{%- endfor -%}"""
    + _PROMPT
)

# Reasoning is kept behind the last question only, and the last message always gets a think block.
QWEN3 = (
    r"""{%- set system = messages[0].content if messages[0].role == 'system' else '' -%}
{%- if tools %}{{ '<|im_start|>system\n' ~ (system ~ '\n\n' if messages[0].role == 'system' else '') }}"""
    + _TOOLS
    + r"""
{%- elif messages[0].role == 'system' %}{{ '<|im_start|>system\n' ~ system ~ '<|im_end|>\n' }}{% endif -%}
{%- set state = namespace(last=messages|length - 1) -%}
{%- for m in messages -%}
{%- if m.role == 'user' and not (m.content.startswith('<tool_response>') and m.content.endswith('</tool_response>')) -%}
{%- set state.last = loop.index0 -%}
{%- endif -%}
{%- endfor -%}
{%- for m in messages -%}
{%- if m.role == 'tool' -%}"""
    + _TOOL_TURN
    + r"""
{%- elif m.role == 'assistant' -%}
{%- set text = m.content.split('</think>')[-1].lstrip('\n') if '</think>' in m.content else m.content -%}
{%- set before = m.content.split('</think>')[0].rstrip('\n') if '</think>' in m.content else '' -%}
{%- set thought = before.split('<think>')[-1].lstrip('\n') -%}
{{ '<|im_start|>assistant\n' }}
{%- if loop.index0 > state.last and (loop.last or thought) -%}
{{ '<think>\n' ~ thought.strip('\n') ~ '\n</think>\n\n' ~ text.lstrip('\n') }}
{%- else %}{{ text }}{% endif -%}
{%- for call in m.tool_calls or [] -%}
{%- if text or not loop.first %}{{ '\n' }}{% endif -%}"""
    + _CALL
    + r"""{% endfor -%}{{ '<|im_end|>\n' }}
{%- elif m.role != 'system' or not loop.first -%}
{{ '<|im_start|>' ~ m.role ~ '\n' ~ m.content ~ '<|im_end|>\n' }}
{%- endif -%}
{%- endfor -%}"""
    + _PROMPT
)

# A default system message and nothing about tools.
SMOLLM2 = (
    r"""{%- if messages[0].role != 'system' -%}
{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}
{%- endif -%}
{%- for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\n' ~ m.content ~ '<|im_end|>\n' }}{% endfor -%}"""
    + _PROMPT
)
