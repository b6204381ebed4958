"""Detection of the output format from short excerpts of real templates."""

from __future__ import annotations

import pytest

from branchline.chat.parsing.detection import RenderedCall, detect_output_format
from branchline.chat.parsing.output_parser import OutputFormat
from branchline.core.message import ToolCall

THINKS = "{{ '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}"
LLAMA = "{{ '<|start_header_id|>' + message.role }}"


@pytest.mark.parametrize(
    ("source", "prompt", "expected"),
    [
        ("{{ '<tool_call>\\n{\"name\": ' }}", "<|im_start|>assistant\n", OutputFormat("hermes")),
        (THINKS + "{{ '<tool_call>' }}", "<|im_start|>assistant\n", OutputFormat("hermes", "think")),
        (THINKS + "<tool_call>", "assistant\n<think>\n", OutputFormat("hermes", "think", True)),
        (THINKS + "<tool_call>", "assistant\n<think>\n\n</think>\n\n", OutputFormat("hermes", "think")),
        ("{{ '<tool_call>\\n<function=' + name }}", "", OutputFormat("qwen3_coder")),
        ("<tool_call>{{ '<arg_key>' }}" + THINKS, "<|assistant|>", OutputFormat("glm", "think")),
        (
            "{{ '<|start|>assistant<|channel|>analysis<|message|>' }}",
            "<|start|>assistant",
            OutputFormat("harmony"),
        ),
        ("{{ '<｜tool▁calls▁begin｜>' }}", "<｜Assistant｜>", OutputFormat("deepseek")),
        (
            "{{ content.split('</think>')[-1] }}{{ '<｜tool▁calls▁begin｜>' }}",
            "<｜Assistant｜><think>\n",
            OutputFormat("deepseek", "think", True),
        ),
        (
            "{{ '<｜tool▁calls▁begin｜>' }}'</think>'",
            "<｜Assistant｜></think>",
            OutputFormat("deepseek", "think"),
        ),
        ("{{ '<|tool_calls_section_begin|>' }}", "<|im_assistant|>", OutputFormat("kimi")),
        (
            "{% set open = '<minimax:tool_call>' %}" + THINKS,
            "]~b]ai\n<think>\n",
            OutputFormat("minimax", "think", True),
        ),
        ("{{ '[TOOL_CALLS][' }}", "", OutputFormat("mistral")),
        (
            "{{ '[TOOL_CALLS]' }}{{ '[THINK]' + thinking + '[/THINK]' }}",
            "",
            OutputFormat("mistral", "mistral"),
        ),
        (LLAMA + "{% if message.tool_calls %}", "", OutputFormat("llama3")),
        (LLAMA, "", OutputFormat()),
        (LLAMA + "{{ '>>>all\\n' }}{{ message.tool_calls }}", "", OutputFormat("functionary_v32")),
        (LLAMA + "{{ ' functools[' }}{{ message.tool_calls }}", "", OutputFormat("functools")),
        ("{{ '\\nAction:\\n```json\\n[' }}", "", OutputFormat("command_r")),
        ("{{ 'function call' + '<|role_sep|>' }}", "", OutputFormat("gigachat3")),
        (
            "{{ '<|start|>assistant to=self<|message|>' }}{{ '<atem:invoke name=' }}" + THINKS,
            "<|start|>assistant",
            OutputFormat("muse_glimmer"),
        ),
        ("{{ '<|START_RESPONSE|>' }}", "<|CHATBOT_TOKEN|>", OutputFormat("cohere")),
        ("<start_of_turn>{{ message.content }}", "<start_of_turn>model\n", OutputFormat()),
        ("", "", OutputFormat()),
    ],
)
def test_the_format_is_detected_from_the_template(source: str, prompt: str, expected: OutputFormat) -> None:
    assert detect_output_format(source, prompt).output_format == expected


def test_a_template_that_shows_no_reasoning_gets_no_reasoning_parser() -> None:
    # Qwen2.5: the tokens may be in the vocabulary, but the template would drop the reasoning.
    detected = detect_output_format("{{ '<tool_call>' }}", "", ["<think>", "</think>"])
    assert detected.output_format == OutputFormat("hermes")


def test_without_a_template_the_added_tokens_decide() -> None:
    assert detect_output_format("", "", ["<|python_tag|>"]).output_format == OutputFormat("llama3")
    detected = detect_output_format("", "", {"<tool_call>", "<think>", "</think>"})
    assert detected.output_format == OutputFormat("hermes", "think")


CALL = ToolCall("look", '{"at": "x"}')


def test_the_rendered_call_decides_between_formats() -> None:
    source = "{{ '<tool_call>' }}{{ '<function=' }}{{ '<tool_calls>[' }}"
    for text, tool_format in (
        ('<tool_call>{"name": "look", "arguments": {"at": "x"}}</tool_call>', "hermes"),
        ("<tool_call><function=look><parameter=at>x</parameter></function></tool_call>", "qwen3_coder"),
        ('<tool_calls>[{"name": "look", "arguments": {"at": "x"}}]</tool_calls>', "tool_calls"),
    ):
        detected = detect_output_format(source, rendered_call=RenderedCall(text, CALL, ()))
        assert (detected.output_format, detected.unread_call) == (OutputFormat(tool_format), "")


def test_markers_may_occur_only_in_the_rendered_call() -> None:
    text = "<tool_calls:opensource><tool_call:opensource>look<tool_sep:opensource>"
    text += "<arg_key:opensource>at</arg_key:opensource><arg_value:opensource>x</arg_value:opensource>"
    text += "</tool_call:opensource></tool_calls:opensource>"
    detected = detect_output_format(
        "{{ '<tool_calls{}>'.format(t) }}", rendered_call=RenderedCall(text, CALL, ())
    )
    assert detected.output_format == OutputFormat("hunyuan")


def test_a_call_that_no_parser_reads_is_reported_and_outputs_are_text() -> None:
    text = "<tool_call>look: at=x</tool_call>"
    detected = detect_output_format("{{ '<tool_call>' }}", rendered_call=RenderedCall(text, CALL, ()))
    assert (detected.output_format, detected.unread_call) == (OutputFormat(), text)
