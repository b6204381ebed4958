"""The `renderers` codec with real tokenizers, and every family with a tokenizer that has its markers.

Random plans run as in `generic/test_contract`: tokenization varies and JSON is compact, so that encoding a
sampled text again is detected.
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
from hypothesis import example, given, settings
from hypothesis import strategies as st

from branchline import ExportPolicy, Session, export_samples
from branchline.chat.base import NewMessage, RewriteReason
from branchline.chat.renderers_codec.codec import RenderersCodec
from branchline.chat.renderers_codec.families import FAMILIES
from branchline.chat.renderers_codec.splice import Splicer
from branchline.chat.segment_encoder import SegmentEncoder
from branchline.chat.tokenizer import ORDINARY, TokenizerDir
from branchline.chat.tokenizer_codec import ReplyReader
from branchline.core.call import Delivery, Generation, Request
from branchline.core.errors import CodecError, TemplateError
from branchline.core.message import Media, Message, ToolCall
from branchline.core.token_arrays import Ids, as_ids
from branchline.testing.plan_runner import PlanRunner
from branchline.testing.plans import PlanGenerator, PlannedCall, ReplyStyle
from branchline.testing.reply_encoder import TemplateReplyEncoder
from branchline.timelines.causes import Cause
from tests.chat.families import load_tokenizer
from tests.chat.harness import without_whitespace

pytest.importorskip("renderers", reason="renderers is not installed: pip install -e '.[images]'")

REAL = {"deepseek_v3": "deepseek_v3", "qwen3": "qwen3", "llama_3": "llama3_2"}
"""Families whose own tokenizer is available."""
MARKERS = [
    "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<arg_key>",
    "</arg_key>", "<arg_value>", "</arg_value>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>",
    "<|im_middle|>", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>", "<|tool_call_end|>", "<|media_begin|>", "<|media_content|>",
    "<|media_pad|>", "<|media_end|>", "]~!b[", "]~b]", "[e~[", "<minimax:tool_call>",
    "</minimax:tool_call>",
]  # fmt: skip
KINDS = list(PlanGenerator(Random(0))._actions())
TOOLS = ({"type": "function", "function": {"name": "work", "parameters": {"type": "object"}}},)
EMPTY_REASONING = re.compile(r"^\s*(<think>\s*</think>|</think>)\s*")
properties = settings(max_examples=15, deadline=None)


@cache
def synthetic_tokenizer(directory: Path) -> TokenizerDir:
    """Returns Qwen3's tokenizer with the markers of other families as added tokens."""
    qwen = load_tokenizer("qwen3")
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
        return RenderersCodec(load_tokenizer("deepseek_v3"), family)
    if family in REAL:
        return RenderersCodec(load_tokenizer(REAL[family]), family)
    return RenderersCodec(synthetic_tokenizer(directory), family)


class RenderersReplyEncoder(TemplateReplyEncoder):
    """A model that writes replies as its renderer shows them."""

    def __init__(self, codec: RenderersCodec, rng: Random, *, vary_tokenization: bool = True) -> None:
        self._codec: Any = codec
        self._rng = rng
        self._vary_tokenization = vary_tokenization

    def encode_reply(self, message: Message, *, stop: bool = True) -> Ids:
        text, end = self._shown(message)
        if self._vary_tokenization and self._rng.random() < 0.5:
            for call in message.tool_calls:
                spaced = json.dumps(json.loads(call.arguments))
                text = text.replace(spaced, json.dumps(json.loads(call.arguments), separators=(",", ":")))
        ids = self._encode(text, ORDINARY)
        return as_ids(np.append(ids, end)) if stop else ids

    def _shown(self, message: Message) -> tuple[str, int]:
        """Returns the text of the reply after its generation prompt, and the id that ends it."""
        if self._codec.family.startswith("kimi"):
            # The model generates the ids of its calls.
            calls = [
                ToolCall(call.name, call.arguments, f"functions.{call.name}:{place}")
                for place, call in enumerate(message.tool_calls)
            ]
            message = Message(
                "assistant",
                message.content,
                reasoning_content=message.reasoning_content,
                tool_calls=tuple(calls),
            )
        inside = self._codec.output_format({}).starts_in_reasoning
        plain = Message("assistant", message.content, tool_calls=message.tool_calls) if inside else message
        text, end = self._render_reply(plain)
        if inside:
            text = f"{message.reasoning_content}\n</think>\n\n{EMPTY_REASONING.sub('', text)}"
        return text, end

    def _render_reply(self, message: Message) -> tuple[str, int]:
        ask = Message("user", ".")
        result = Message("tool", "r", tool_call_id=message.tool_calls[0].id) if message.tool_calls else ask
        for following in ([result], []):
            whole = self._codec._render([ask, message, *following], (), {})
            span = whole.sampled_span(1)
            assert span is not None
            sampled = whole.ids[slice(*span)]
            # GLM ends a reply with the opener of the next message, so the last reply has no end.
            end = int(sampled[-1]) if int(sampled[-1]) in self._codec.stop_ids else min(self._codec.stop_ids)
            # Qwen3.5 and Nemotron print booleans as Python does, but are trained to write JSON.
            text = self._codec.decode(sampled[:-1] if sampled[-1] == end else sampled)
            text = text.replace("\nTrue\n", "\ntrue\n")
            if message.reasoning_content in text:
                break
        return text, end


def reply_style_of(family: str) -> ReplyStyle:
    if family == "llama_3":
        return ReplyStyle(max_tool_calls=1, text_with_tool_calls=False)
    return ReplyStyle()


def run_plan(
    codec: RenderersCodec, seed: int, steps: int, only: list[Cause], think: bool, history: str
) -> tuple[PlanRunner, list[PlannedCall]]:
    think = think and codec._family_config.output_format.reasoning_format != "none"
    plan = PlanGenerator(Random(seed), reasoning=think, style=reply_style_of(codec.family)).generate(
        steps, only=only
    )
    runner = PlanRunner(Session("s", codec, history=history), RenderersReplyEncoder(codec, Random(seed)))  # type: ignore[arg-type]
    runner.run(plan)
    return runner, plan


def check(runner: PlanRunner, codec: RenderersCodec) -> None:
    tree = runner.session.tree
    for one in runner.executed:
        for node_id, ids in zip(one.call.outputs, one.outputs, strict=True):
            node = tree.nodes[node_id]
            assert tree.path_ids(node).tolist() == [*one.prompt_ids.tolist(), *ids.tolist()]
            assert codec.parse(ids).key == node.message.key
    report = export_samples(tree, ExportPolicy()).report
    assert report.is_balanced
    assert report.sampled_tokens == sum(len(ids) for one in runner.executed for ids in one.outputs)


def check_shows_the_plain_render(runner: PlanRunner, codec: RenderersCodec) -> None:
    """Checks that prompts are what the renderer writes, apart from whitespace. Only in replies that stand in
    the prompt as they were sampled, booleans are JSON's where the renderer prints Python's."""
    tree = runner.session.tree
    for one in runner.executed:
        path = tree.nodes[one.call.prompt_node].path()
        plain = codec._render([node.message for node in path], one.planned.tools, {})
        cursor, expected = 0, ""
        for index, node in enumerate(path):
            span = plain.sampled_span(index) if node.ends_sampled else None
            if span is not None:
                expected += codec.decode(plain.ids[cursor : span[0]])
                expected += codec.decode(plain.ids[slice(*span)]).replace("\nTrue\n", "\ntrue\n")
                cursor = span[1]
        expected += codec.decode(plain.ids[cursor:])
        assert without_whitespace(codec.decode(one.prompt_ids)) == without_whitespace(expected)


def check_forks_only_where_thinking_changes(runner: PlanRunner, history: str) -> None:
    """Checks the reasons of forks.

    A template drops reasoning once a user message follows, and shows it again if that message is deleted.
    Verbatim drops none; only after a message whose reasoning is shown again the path does not join.
    """
    for one in runner.executed:
        path = runner.session.tree.nodes[one.call.prompt_node].path()
        if one.call.rewrite_reason == "think_strip":
            assert history == "template"
            assert any(node.message.reasoning_content and not node.ends_sampled for node in path)
        elif one.call.rewrite_reason:
            assert one.call.rewrite_reason == "rewritten"
            shown = [node for node in path if node.message.reasoning_content and node.source_id >= 0]
            decode = runner.session.codec.decode
            assert any(node.message.reasoning_content in decode(node.ids) for node in shown)


cases = (st.integers(0, 2**32), st.integers(0, 8), st.lists(st.sampled_from(KINDS), max_size=4, unique=True))


@pytest.mark.parametrize("history", ["template", "verbatim"])
@pytest.mark.parametrize("family", sorted(REAL))
@properties
@example(9728, 6, [Cause.CANCELLED, Cause.RETRY, Cause.EDIT, Cause.CONTEXT_DELETE], True)
@given(*cases, st.booleans())
def test_the_contract_holds_on_real_tokenizers(
    markers: Path, family: str, history: str, seed: int, steps: int, only: list[Cause], think: bool
) -> None:
    codec = codec_of(family, markers)
    runner, _ = run_plan(codec, seed, steps, only, think, history)
    check(runner, codec)
    check_forks_only_where_thinking_changes(runner, history)
    if history == "template":
        check_shows_the_plain_render(runner, codec)


@pytest.mark.parametrize("history", ["template", "verbatim"])
@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - REAL.keys()))
@settings(max_examples=5, deadline=None)
@given(*cases, st.booleans())
def test_the_contract_holds_for_every_family(
    markers: Path, family: str, history: str, seed: int, steps: int, only: list[Cause], think: bool
) -> None:
    codec = codec_of(family, markers)
    runner, _ = run_plan(codec, seed, steps, only, think, history)
    check(runner, codec)
    if history == "template":
        check_shows_the_plain_render(runner, codec)


@pytest.fixture
def qwen3(markers: Path) -> RenderersCodec:
    return codec_of("qwen3", markers)


def commit_reply(session: Session, codec: RenderersCodec, messages: list[Message], output: Ids) -> Any:
    turn = session.prepare(Request(tuple(messages), TOOLS))
    call = session.commit(turn, Generation(output, None, 0, "stop", codec.parse(output))).call
    session.record_delivery(call, Delivery.DELIVERED)
    return turn


@pytest.mark.parametrize("history", ["template", "verbatim"])
def test_cut_reasoning_is_closed_by_the_next_message(qwen3: RenderersCodec, history: Any) -> None:
    session = Session("s", qwen3, history=history)
    cut = qwen3.tokenizer.encode("<think>\nhm, wel")
    ask = Message("user", "q")
    first = commit_reply(session, qwen3, [ask], cut)
    reply = qwen3.parse(cut, "length")
    assert reply.reasoning_content == "hm, wel"
    result = Message("tool", "r", tool_call_id="c")
    second = commit_reply(session, qwen3, [ask, reply, result], qwen3.tokenizer.encode("ok<|im_end|>"))
    kept = [*first.prompt_ids.tolist(), *cut.tolist()]
    assert second.prompt_ids[: len(kept)].tolist() == kept
    rest = qwen3.decode(second.prompt_ids[len(kept) :])
    assert rest.startswith("\n</think>\n\n<|im_end|>\n<|im_start|>user\n<tool_response>")


def test_verbatim_keeps_reasoning_that_the_template_drops(qwen3: RenderersCodec) -> None:
    output = qwen3.tokenizer.encode("<think>\nhm\n</think>\n\nyes<|im_end|>")
    ask, more = Message("user", "q"), Message("user", "more")
    for history, dropped in (("verbatim", False), ("template", True)):
        session = Session("s", qwen3, history=history)  # type: ignore[arg-type]
        commit_reply(session, qwen3, [ask], output)
        turn = commit_reply(session, qwen3, [ask, qwen3.parse(output), more], output)
        assert ("hm" not in qwen3.decode(turn.prompt_ids)) == dropped
        assert turn.rewrite_reason == ("think_strip" if dropped else "")


def test_prompts_extend_if_the_generation_prompt_begins_the_answer(
    qwen3: RenderersCodec,
) -> None:
    codec = RenderersCodec(qwen3.tokenizer, "qwen3", enable_thinking=False)
    session = Session("s", codec)
    messages = [Message("user", "q0")]
    for step in range(4):
        output = codec.tokenizer.encode(f"answer {step}<|im_end|>")
        turn = commit_reply(session, codec, messages, output)
        assert turn.rewrite_reason == ""
        assert codec.decode(turn.generation_prompt_ids).endswith("<think>\n\n</think>\n\n")
        messages += [codec.parse(output), Message("user", f"q{step + 1}")]


def test_template_arguments_are_fields_of_the_familys_config(qwen3: RenderersCodec) -> None:
    plain = qwen3.extend((), [NewMessage(Message("user", "q"))])
    quick = qwen3.extend(
        (), [NewMessage(Message("user", "q"))], chat_template_kwargs={"enable_thinking": False}
    )
    assert len(quick.generation_prompt_ids) > len(plain.generation_prompt_ids)
    with pytest.raises(TemplateError, match="got think_hard, but qwen3 has enable_thinking"):
        qwen3.extend((), [NewMessage(Message("user", "q"))], chat_template_kwargs={"think_hard": True})


def test_a_message_sampled_on_another_path_keeps_its_ids(qwen3: RenderersCodec) -> None:
    odd = as_ids([71, 4791, *qwen3.tokenizer.encode("<|im_end|>").tolist()])
    assert qwen3.tokenizer.encode("hello").tolist() == [14990]
    messages = [
        NewMessage(Message("user", "q")),
        NewMessage(qwen3.parse(odd), odd),
        NewMessage(Message("user", "more")),
    ]
    extension = qwen3.extend((), messages)
    assert extension.message_tokens[1].ids[-3:].tolist() == odd.tolist()
    whole = sum(len(piece.ids) for piece in extension.message_tokens) + len(extension.generation_prompt_ids)
    assert extension.encoded_tokens == whole - len(odd)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_our_parser_and_the_renderers_parser_agree(markers: Path, family: str) -> None:
    codec = codec_of(family, markers)
    think = codec._family_config.output_format.reasoning_format != "none"
    planned = PlanGenerator(Random(5), reasoning=think, style=reply_style_of(family)).generate(12, only=[])
    renderer, encoder = codec._get_renderer({}), RenderersReplyEncoder(codec, Random(5))
    prompt = codec._render([Message("user", ".")], (), {}).ids.tolist()
    for output in (output for call in planned for output in call.outputs):
        ids = encoder.encode_reply(output.message)
        theirs = renderer.parse_response(ids.tolist(), prompt_ids=prompt)
        ours = codec.parse(ids)
        assert ours.content.strip() == theirs.content.strip()
        assert ours.reasoning_content.strip() == (theirs.reasoning_content or "").strip()
        assert [call.name for call in ours.tool_calls] == [call.name for call in theirs.tool_calls]
        assert [json.loads(call.arguments) for call in ours.tool_calls] == [
            call.arguments if isinstance(call.arguments, dict) else json.loads(str(call.arguments))
            for call in theirs.tool_calls
        ]


def test_deltas_add_up_to_the_whole_message(qwen3: RenderersCodec) -> None:
    call = ToolCall("work", '{"a": "é"}')
    sampled = Message("assistant", "so", reasoning_content="hm", tool_calls=(call,))
    ids = RenderersReplyEncoder(qwen3, Random(1)).encode_reply(sampled)
    parser = qwen3.parser(TOOLS)
    deltas = [delta for token in ids.tolist() for delta in parser.feed([token])] + parser.finish("stop")
    assert "".join(delta.content for delta in deltas) == "so"
    assert "".join(delta.reasoning_content for delta in deltas) == "hm"
    assert parser.message == qwen3.parse(ids)
    assert parser.message.tool_calls == (call,)


def test_count_tokens_is_the_length_of_the_prompt(qwen3: RenderersCodec) -> None:
    messages = [Message("system", "s"), Message("user", "q")]
    extension = qwen3.extend((), [NewMessage(message) for message in messages], tools=TOOLS)
    assert qwen3.count_tokens(messages, TOOLS) == sum(
        len(piece.ids) for piece in extension.message_tokens
    ) + len(extension.generation_prompt_ids)


# -- errors ----------------------------------------------------------------------------------------


def test_an_unknown_family_is_refused(qwen3: RenderersCodec) -> None:
    with pytest.raises(CodecError, match="family: got 'auto', expected one of deepseek_r1"):
        RenderersCodec(qwen3.tokenizer, "auto")
    assert RenderersCodec(qwen3.tokenizer, "Qwen3.5").family == "qwen3_5"


def test_a_tokenizer_of_another_family_is_refused(qwen3: RenderersCodec) -> None:
    with pytest.raises(CodecError, match="gMASK"):
        RenderersCodec(qwen3.tokenizer, "glm_5")


def test_an_unknown_option_is_refused(qwen3: RenderersCodec) -> None:
    with pytest.raises(CodecError, match="mood"):
        RenderersCodec(qwen3.tokenizer, "qwen3", mood="good")


def test_an_exception_of_a_renderer_is_a_template_error(markers: Path) -> None:
    llama = codec_of("llama_3", markers)
    calls = (ToolCall("work", "{}", "a"), ToolCall("work", "{}", "b"))
    with pytest.raises(TemplateError, match=r"llama_3 renderer refused .* single tool call"):
        llama.extend(
            (), [NewMessage(Message("user", "q")), NewMessage(Message("assistant", tool_calls=calls))]
        )


def test_a_text_model_refuses_an_image(qwen3: RenderersCodec) -> None:
    image = Media("image", "d", b"x", mime="image/png")
    seen = Message("user", "look", parts=("look", image))
    with pytest.raises(CodecError, match=r"messages\[1\]: carries an image, but .*qwen3 takes no images"):
        qwen3.extend((), [NewMessage(Message("system", "s")), NewMessage(seen)])


def test_a_message_that_the_renderer_drops_is_an_error(qwen3: RenderersCodec, markers: Path) -> None:
    messages = [Message("developer", "be kind"), Message("user", "q")]
    ids = qwen3.extend((), [NewMessage(message) for message in messages]).message_tokens[0].ids
    assert qwen3.decode(ids) == "<|im_start|>system\nbe kind<|im_end|>\n"
    messages = [Message("user", "q"), Message("system", "now rhyme"), Message("user", "go on")]
    with pytest.raises(TemplateError, match=r"messages\[1\]: the qwen3_vl renderer shows no system message"):
        codec_of("qwen3_vl", markers).extend((), [NewMessage(message) for message in messages])


def test_renderers_is_imported_only_when_a_codec_is_created() -> None:
    script = (
        "import branchline.chat.renderers_codec.codec, sys; print({'renderers', 'PIL'} & sys.modules.keys())"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "set()"


# -- broken codecs, each of which must be detected ----------------------------------------------------------


def thinking_session(codec: RenderersCodec) -> PlanRunner:
    plan = PlanGenerator(Random(3), reasoning=True).generate(8, only=[])
    runner = PlanRunner(Session("s", codec), RenderersReplyEncoder(codec, Random(3)))
    runner.run(plan)
    return runner


def test_a_codec_that_ignores_dropped_text_is_detected(
    qwen3: RenderersCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ReplyReader, "have_same_meaning", lambda *_, **__: True)
    monkeypatch.setattr(SegmentEncoder, "control_tokens_in", lambda *_: [])
    with pytest.raises(AssertionError):
        check_shows_the_plain_render(thinking_session(qwen3), qwen3)


def test_a_codec_that_encodes_a_sampled_message_again_is_detected(
    markers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Splicer, "_match", lambda *_: RewriteReason.DROPPED)
    codec = codec_of("deepseek_v3", markers)
    runner, _ = run_plan(codec, 3, 6, [], False, "template")
    with pytest.raises(AssertionError):
        check_forks_only_where_thinking_changes(runner, "template")
