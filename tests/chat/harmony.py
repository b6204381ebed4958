"""A small tokenizer with a chat template in the harmony format of gpt-oss, for tests without downloads.

Like the real template, it shows the analysis before a call only until a final message follows, shows text
next to a call as analysis and refuses both, ends an earlier final message with `<|end|>` and the last one
with `<|return|>`, and writes the recipient of a call before the channel, where models write it after.
"""

from __future__ import annotations

import json
from pathlib import Path

from branchline.chat.generic.codec import GenericCodec
from tests.chat.harness import save_byte_level

TOKENS = (
    "<|start|>",
    "<|end|>",
    "<|message|>",
    "<|channel|>",
    "<|constrain|>",
    "<|return|>",
    "<|call|>",
    "<|endoftext|>",
)
TEMPLATE = """\
{{- '<|start|>system<|message|>Channels: analysis, commentary, final.<|end|>' }}
{%- if tools %}{{- '<|start|>developer<|message|>' + tools|tojson + '<|end|>' }}{% endif %}
{%- set state = namespace(last_final=-1, tool='') %}
{%- for m in messages %}
{%- if m.role == 'assistant' and not m.tool_calls %}{% set state.last_final = loop.index0 %}{% endif %}
{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'assistant' and m.tool_calls %}
{%- if m.content and m.thinking %}{{ raise_exception('content and thinking next to a call') }}{% endif %}
{%- if (m.content or m.thinking) and loop.index0 > state.last_final %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + (m.content or m.thinking) + '<|end|>' }}
{%- endif %}
{%- set state.tool = m.tool_calls[0].function.name %}
{{- '<|start|>assistant to=functions.' + state.tool + '<|channel|>commentary json<|message|>' }}
{{- m.tool_calls[0].function.arguments|tojson + '<|call|>' }}
{%- elif m.role == 'assistant' %}
{%- set is_last = loop.last and not add_generation_prompt %}
{%- if is_last and m.thinking %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}
{%- endif %}
{{- '<|start|>assistant<|channel|>final<|message|>' + m.content }}
{{- '<|return|>' if is_last else '<|end|>' }}
{%- elif m.role == 'tool' %}
{{- '<|start|>functions.' + state.tool + ' to=assistant<|channel|>commentary<|message|>' }}
{{- m.content|tojson + '<|end|>' }}
{%- else %}
{{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{% endif %}
"""


def save_harmony(path: Path, *, declares_stops: bool = True) -> Path:
    """Saves the tokenizer. `declares_stops`: `generation_config.json` declares the stop tokens of gpt-oss."""
    eos_token = "<|return|>" if declares_stops else "<|endoftext|>"
    save_byte_level(path, special=TOKENS, eos_token=eos_token, chat_template=TEMPLATE)
    if declares_stops:
        ids = GenericCodec.open(path).tokenizer.added_tokens
        stops = [ids[token] for token in ("<|return|>", "<|call|>", "<|endoftext|>")]
        (path / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
    return path
