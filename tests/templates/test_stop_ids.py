"""Stop ids and harmony conversations with the real templates of the corpus."""

from __future__ import annotations

import pytest

from branchline.chat.generic.codec import GenericCodec
from tests.chat.families import load_tokenizer
from tests.gateway.harmony_episode import PROTOCOL_CLIENTS, ProtocolClient, verify_episode
from tests.templates.corpus import (
    EOS,
    load_template_codec,
    load_template_tokenizer,
    template_names,
    template_source,
)
from tests.templates.stop_tokens import StopTokenSource, declared_stop_tokens, find_stop_tokens

pytestmark = pytest.mark.slow

GPT_OSS = ("llama_cpp/openai-gpt-oss-120b", "trl/gptoss", "trl/gptoss_training")


def stop_tokens(codec: GenericCodec) -> set[str]:
    return {codec.token_bytes(token).decode() for token in codec.stop_ids}


@pytest.mark.parametrize("name", template_names())
def test_stop_ids_are_those_of_the_real_model(name: str) -> None:
    """A template adds nothing to what a model declares. Without that, it finds no other tokens."""
    declared = set(declared_stop_tokens(name))
    if not declared:
        pytest.skip(f"{name}: the stop tokens of the model are not known")
    assert stop_tokens(load_template_codec(name)) == declared
    assert stop_tokens(GenericCodec(load_template_tokenizer(name, declares_stops=False))) <= declared | {EOS}


@pytest.mark.parametrize("name", template_names())
def test_stop_tokens_from_the_template_are_in_its_source(name: str) -> None:
    found = find_stop_tokens(name)
    if found is None or found[1] is not StopTokenSource.TEMPLATE:
        pytest.skip("its stop tokens come from elsewhere")
    assert all(token in template_source(name) for token in found[0])


@pytest.mark.parametrize(
    ("tokenizer", "name"),
    [
        ("deepseek_v3", "trl/deepseekv3"),
        ("gemma3", "trl/gemma3"),
        ("llama3", "trl/llama3"),
        ("llama3_2", "trl/llama3_2"),
        ("mistral_nemo", "llama_cpp/mistralai-Mistral-Nemo-Instruct-2407"),
        ("qwen2_5", "trl/qwen2_5"),
        ("qwen3", "trl/qwen3"),
    ],
)
def test_the_eos_token_of_a_real_tokenizer_is_listed(tokenizer: str, name: str) -> None:
    eos = load_tokenizer(tokenizer).special_tokens["eos_token"]
    assert eos in declared_stop_tokens(name)


@pytest.mark.parametrize(
    ("name", "stops"),
    [
        *((name, {"<|return|>", "<|call|>"}) for name in GPT_OSS),
        ("llama_cpp/Kimi-K3", {"<|end_of_msg|>"}),
        ("llama_cpp/Cohere2MoE", {"<|END_OF_TURN_TOKEN|>"}),
        ("llama_cpp/CohereForAI-c4ai-command-r7b-12-2024-tool_use", {"<|END_OF_TURN_TOKEN|>"}),
        ("llama_cpp/Apertus-8B-Instruct", {"<|assistant_end|>", "<|tools_suffix|>"}),
        ("llama_cpp/GLM-4.6", {"<|user|>", "<|observation|>"}),
        ("llama_cpp/google-gemma-4-31B-it", {"<turn|>", "<|tool_response>"}),
        ("llama_cpp/Qwen-Qwen3-0.6B", {"<|im_end|>"}),
    ],
)
def test_the_template_alone_shows_the_stop_ids(name: str, stops: set[str]) -> None:
    codec = GenericCodec(load_template_tokenizer(name, declares_stops=False))
    assert stop_tokens(codec) == stops | {EOS}


@pytest.mark.parametrize("name", GPT_OSS[:1])
@pytest.mark.parametrize("exchange", PROTOCOL_CLIENTS)
@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_gpt_oss_keeps_all_sampled_ids_of_a_tool_cycle(
    name: str, exchange: ProtocolClient, streamed: bool
) -> None:
    verify_episode(load_template_codec(name), exchange, streamed)
