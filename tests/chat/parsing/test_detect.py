"""The parser a template needs, from short pieces of templates written as the families write them."""

from __future__ import annotations

import pytest

from branchline.chat.parsing import Detection, detect

THINKS = "{{ '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}"
LLAMA = "{{ '<|start_header_id|>' + message.role }}"


@pytest.mark.parametrize(
    ("source", "prompt", "expected"),
    [
        ("{{ '<tool_call>\\n{\"name\": ' }}", "<|im_start|>assistant\n", Detection("hermes")),
        (THINKS + "{{ '<tool_call>' }}", "<|im_start|>assistant\n", Detection("hermes", "think")),
        (THINKS + "<tool_call>", "assistant\n<think>\n", Detection("hermes", "think", True)),
        (THINKS + "<tool_call>", "assistant\n<think>\n\n</think>\n\n", Detection("hermes", "think")),
        ("{{ '<tool_call>\\n<function=' + name }}", "", Detection("qwen3_coder")),
        ("<tool_call>{{ '<arg_key>' }}" + THINKS, "<|assistant|>", Detection("glm", "think")),
        (
            "{{ '<|start|>assistant<|channel|>analysis<|message|>' }}",
            "<|start|>assistant",
            Detection("harmony"),
        ),
        ("{{ '<｜tool▁calls▁begin｜>' }}", "<｜Assistant｜>", Detection("deepseek")),
        (
            "{{ content.split('</think>')[-1] }}{{ '<｜tool▁calls▁begin｜>' }}",
            "<｜Assistant｜><think>\n",
            Detection("deepseek", "think", True),
        ),
        (
            "{{ '<｜tool▁calls▁begin｜>' }}'</think>'",
            "<｜Assistant｜></think>",
            Detection("deepseek", "think"),
        ),
        ("{{ '<|tool_calls_section_begin|>' }}", "<|im_assistant|>", Detection("kimi")),
        (
            "{% set open = '<minimax:tool_call>' %}" + THINKS,
            "]~b]ai\n<think>\n",
            Detection("minimax", "think", True),
        ),
        ("{{ '[TOOL_CALLS][' }}", "", Detection("mistral")),
        ("{{ '[TOOL_CALLS]' }}{{ '[THINK]' + thinking + '[/THINK]' }}", "", Detection("mistral", "mistral")),
        (LLAMA + "{% if message.tool_calls %}", "", Detection("llama3")),
        (LLAMA, "", Detection()),
        ("<start_of_turn>{{ message.content }}", "<start_of_turn>model\n", Detection()),
        ("", "", Detection()),
    ],
)
def test_a_template_names_its_parser(source: str, prompt: str, expected: Detection) -> None:
    assert detect(source, prompt) == expected


def test_a_template_that_shows_no_reasoning_gets_no_reasoning_parser() -> None:
    # Qwen2.5: the tokens may be in the vocabulary, the template would still lose what they frame.
    assert detect("{{ '<tool_call>' }}", "", ["<think>", "</think>"]) == Detection("hermes")


def test_where_there_is_no_template_the_tokens_speak() -> None:
    assert detect("", "", ["<|python_tag|>"]) == Detection("llama3")
    assert detect("", "", {"<tool_call>", "<think>", "</think>"}) == Detection("hermes", "think")
