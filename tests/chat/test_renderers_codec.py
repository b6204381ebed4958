"""The `renderers` codec on real tokenizers, and every family of the list on one that has their markers.

Random behaviours are played as in `test_contract`: an odd speaker cuts words anywhere and writes compact
JSON, so whatever encodes a sampled text again is found out.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from branchline import ExportPolicy, Session, export_samples, timelines_of
from branchline.chat.base import Shown
from branchline.chat.renderers_codec import FAMILIES, RenderersCodec
from branchline.chat.tokenizer import TokenizerDir
from branchline.core.errors import CodecError, TemplateError
from branchline.core.message import Media, Message, ToolCall
from branchline.core.runs import Ids, as_ids
from branchline.testing.behaviours import Behaviour, Manners, PlannedCall
from branchline.testing.player import Player
from branchline.testing.speaker import TemplateSpeaker
from branchline.timelines.causes import Cause

pytest.importorskip("renderers", reason="renderers is not installed: pip install 'branchline[renderers]'")

TOKENIZERS = Path(__file__).parents[2] / ".cache" / "tokenizers"
REAL = {"deepseek_v3": "deepseek_v3", "qwen3": "qwen3", "llama_3": "llama3_2"}
"""Families whose own tokenizer is at hand."""
MARKERS = [
    "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<arg_key>",
    "</arg_key>", "<arg_value>", "</arg_value>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>",
    "<|im_middle|>", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>", "<|tool_call_end|>", "<|media_begin|>", "<|media_content|>",
    "<|media_pad|>", "<|media_end|>", "]~!b[", "]~b]", "[e~[", "<minimax:tool_call>",
    "</minimax:tool_call>",
]  # fmt: skip
KINDS = list(Behaviour(Random(0))._actions())
TOOLS = ({"type": "function", "function": {"name": "work", "parameters": {"type": "object"}}},)
NO_THOUGHT = re.compile(r"^\s*(<think>\s*</think>|</think>)\s*")
properties = settings(max_examples=15, deadline=None)


@cache
def real_tokenizer(name: str) -> TokenizerDir:
    if not (TOKENIZERS / name / "tokenizer.json").exists():
        pytest.skip(f"tokenizer {name} is not in the cache: scripts/fetch_tokenizers.py fetches it")
    return TokenizerDir.open(TOKENIZERS / name)


@cache
def made_up_tokenizer(directory: Path) -> TokenizerDir:
    """Qwen3's tokenizer with the markers of other families as added tokens."""
    qwen = real_tokenizer("qwen3")
    made = json.loads((qwen.path / "tokenizer.json").read_bytes())
    first = qwen.vocab_size
    made["added_tokens"] += [
        {"id": first + place, "content": marker, "special": True, "single_word": False,
         "lstrip": False, "rstrip": False, "normalized": False}
        for place, marker in enumerate(MARKERS)
    ]  # fmt: skip
    (directory / "tokenizer.json").write_text(json.dumps(made))
    return TokenizerDir.open(directory)


@pytest.fixture(scope="session")
def markers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("markers")


@cache
def codec_of(family: str, directory: Path) -> RenderersCodec:
    if family.startswith("deepseek"):
        return RenderersCodec(real_tokenizer("deepseek_v3"), family)
    if family in REAL:
        return RenderersCodec(real_tokenizer(REAL[family]), family)
    return RenderersCodec(made_up_tokenizer(directory), family)


class RenderersSpeaker(TemplateSpeaker):
    """A model that writes as its renderer shows its own replies."""

    def __init__(self, codec: RenderersCodec, rng: Random, *, odd: bool = True) -> None:
        self._codec: Any = codec
        self._rng = rng
        self._odd = odd

    def spell(self, message: Message, *, stop: bool = True) -> Ids:
        text, end = self._shown(message)
        if self._odd and self._rng.random() < 0.5:
            for call in message.calls:
                spaced = json.dumps(json.loads(call.arguments))
                text = text.replace(spaced, json.dumps(json.loads(call.arguments), separators=(",", ":")))
        ids = self._encode(text)
        return as_ids(np.append(ids, end)) if stop else ids

    def _shown(self, message: Message) -> tuple[str, int]:
        """The reply behind its generation prompt, and the id that ends it."""
        if self._codec.family.startswith("kimi"):
            # It names its calls itself.
            calls = [
                ToolCall(call.name, call.arguments, f"functions.{call.name}:{place}")
                for place, call in enumerate(message.calls)
            ]
            message = Message("assistant", message.text, reasoning=message.reasoning, calls=tuple(calls))
        inside = self._codec._starts_inside({})
        plain = Message("assistant", message.text, calls=message.calls) if inside else message
        text, end = self._render(plain)
        if inside:
            text = f"{message.reasoning}\n</think>\n\n{NO_THOUGHT.sub('', text)}"
        return text if message.reasoning or inside else NO_THOUGHT.sub("", text), end

    def _render(self, message: Message) -> tuple[str, int]:
        ask = Message("user", ".")
        result = Message("tool", "r", answers=message.calls[0].id) if message.calls else ask
        for following in ([result], []):
            whole = self._codec._render([ask, message, *following], (), {})
            span = whole.sampled_span(1)
            assert span is not None
            said = whole.ids[slice(*span)]
            # GLM ends a reply with what opens the next message, so its last one has no end.
            end = int(said[-1]) if int(said[-1]) in self._codec.stop_ids else min(self._codec.stop_ids)
            # Qwen3.5 and Nemotron show booleans as Python does, and are asked for JSON.
            text = self._codec.decode(said[:-1] if said[-1] == end else said)
            text = text.replace("\nTrue\n", "\ntrue\n")
            if message.reasoning in text:
                break
        return text, end


def manners_of(family: str) -> Manners:
    if family == "llama_3":
        return Manners(most_calls=1, text_beside_calls=False)
    return Manners()


def play(
    codec: RenderersCodec, seed: int, steps: int, only: list[Cause], think: bool, history: str
) -> tuple[Player, list[PlannedCall]]:
    think = think and codec._family.reasoning != "none"
    plan = Behaviour(Random(seed), reasoning=think, manners=manners_of(codec.family)).plan(steps, only=only)
    player = Player(Session("s", codec, history=history), RenderersSpeaker(codec, Random(seed)))  # type: ignore[arg-type]
    player.play(plan)
    return player, plan


def check(player: Player, codec: RenderersCodec) -> None:
    tree = player.session.tree
    for one in player.played:
        for node_id, ids in zip(one.call.outputs, one.outputs, strict=True):
            node = tree.nodes[node_id]
            assert tree.path_ids(node).tolist() == [*one.prompt_ids.tolist(), *ids.tolist()]
            assert codec.parse(ids).key == node.message.key
    report = export_samples(tree, ExportPolicy()).report
    assert report.is_balanced
    assert report.sampled_tokens == sum(len(ids) for one in player.played for ids in one.outputs)


def squeezed(text: str) -> str:
    return "".join(text.split())


def check_shows_the_plain_render(player: Player, codec: RenderersCodec) -> None:
    """A prompt reads as the renderer writes the conversation, whitespace apart."""
    tree = player.session.tree
    for one in player.played:
        messages = [entry.message for entry in tree.nodes[one.call.prompt_node].path()]
        plain = codec._render(messages, one.planned.tools, {})
        assert squeezed(codec.decode(one.prompt_ids)) == squeezed(codec.decode(plain.ids))


def check_forks_only_where_thinking_is_dropped(player: Player) -> None:
    for one in player.played:
        assert one.call.rewritten in ("", "think_strip")
        if one.call.rewritten:
            path = player.session.tree.nodes[one.call.prompt_node].path()
            assert any(node.message.reasoning and not node.ends_sampled for node in path)


cases = (st.integers(0, 2**32), st.integers(0, 8), st.lists(st.sampled_from(KINDS), max_size=4, unique=True))


@pytest.mark.parametrize("history", ["template", "verbatim"])
@pytest.mark.parametrize("family", sorted(REAL))
@properties
@given(*cases, st.booleans())
def test_the_contract_holds_on_real_tokenizers(
    markers: Path, family: str, history: str, seed: int, steps: int, only: list[Cause], think: bool
) -> None:
    codec = codec_of(family, markers)
    player, _ = play(codec, seed, steps, only, think, history)
    check(player, codec)
    if history == "template":
        check_shows_the_plain_render(player, codec)
        check_forks_only_where_thinking_is_dropped(player)
    else:
        assert {one.call.rewritten for one in player.played} <= {""}


@pytest.mark.parametrize("history", ["template", "verbatim"])
@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - REAL.keys()))
@settings(max_examples=5, deadline=None)
@given(*cases, st.booleans())
def test_the_contract_holds_for_every_family_of_the_list(
    markers: Path, family: str, history: str, seed: int, steps: int, only: list[Cause], think: bool
) -> None:
    codec = codec_of(family, markers)
    player, _ = play(codec, seed, steps, only, think, history)
    check(player, codec)
    if history == "template":
        check_shows_the_plain_render(player, codec)
