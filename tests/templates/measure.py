"""Plays random conversations on one template and measures what its codec does to them.

Two kinds of plans are played: conversations that only grow, in which every fork is the template's doing, and
plans with everything agents do (retries, edits, compaction, sub-agents).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from random import Random
from typing import Any

from branchline import Session
from branchline.chat.base import (
    Extension,
    HistoryPolicy,
    NewMessage,
    PathMessage,
    PromptMessage,
    RewriteReason,
    Tools,
)
from branchline.chat.generic.codec import GenericCodec
from branchline.core.errors import TemplateError
from branchline.core.message import Message, ToolCall
from branchline.testing.plan_runner import ExecutedCall, PlanRunner, causal_order
from branchline.testing.plans import PlanGenerator
from branchline.testing.probed_reply_encoder import ProbedReplyEncoder
from branchline.tree.tree import Turn
from tests.templates.corpus import load_template_codec
from tests.templates.oracle import PlainRenderer

PLAN_TOOLS = PlanGenerator(Random(0)).generate(0)[0].tools
_SYSTEM, _USER = Message("system", "zqsystem"), Message("user", "zqask")
_GROWING_SEEDS, _AGENT_SEEDS = range(4), range(4)
_GROWING_STEPS, _AGENT_STEPS = 6, 6


@dataclass(frozen=True)
class Fork:
    """A call whose prompt does not keep the whole path."""

    reason: str
    is_needless: bool
    """The template shows the whole path in this conversation."""
    follows: str
    """The role of the last message."""
    is_growing: bool
    """The conversation only grew."""
    evidence: str = ""


@dataclass
class Measurement:
    """What was measured on one template."""

    name: str
    shapes: tuple[str, ...] = ()
    """The replies that were sampled."""
    unread_shapes: tuple[str, ...] = ()
    """The replies that the template shows and no parser reads back."""
    refused_shapes: dict[str, str] = field(default_factory=dict)
    """The replies that the template refuses, with its messages."""
    drops_results: bool = False
    """The template leaves out the result of a tool and does not refuse it."""
    calls: int = 0
    continuing_calls: int = 0
    exact_calls: int = 0
    corrupted: list[str] = field(default_factory=list)
    refused_calls: int = 0
    refusals: Counter[str] = field(default_factory=Counter)
    """The template's messages about the calls that it refused."""
    forks: list[Fork] = field(default_factory=list)
    verbatim_forks: int = 0

    @property
    def forks_by_reason(self) -> Counter[str]:
        return Counter(fork.reason for fork in self.forks)

    @property
    def needless_forks(self) -> list[Fork]:
        return [fork for fork in self.forks if fork.is_needless]

    @property
    def growing_forks(self) -> list[Fork]:
        return [fork for fork in self.forks if fork.is_growing]


@dataclass(frozen=True)
class _ExtendedPath:
    path: tuple[PathMessage, ...]
    new: tuple[NewMessage, ...]
    tools: Tools
    extension: Extension


class RecordingRunner(PlanRunner):
    """A runner that records the path which every prompt extends."""

    def __init__(self, session: Session, encoder: ProbedReplyEncoder) -> None:
        super().__init__(session, encoder)
        self.extended: dict[int, _ExtendedPath] = {}
        self._last: list[_ExtendedPath] = []
        extend = session.codec.extend

        def record(path: Sequence[PathMessage], new: Sequence[NewMessage], **options: Any) -> Extension:
            extension = extend(path, new, **options)
            self._last.append(_ExtendedPath(tuple(path), tuple(new), options["tools"], extension))
            return extension

        session.codec.extend = record  # type: ignore[method-assign]

    def prepare(self, planned: Any) -> Turn:
        turn = super().prepare(planned)
        self.extended[planned.index] = self._last[-1]
        return turn


def measure_template(name: str) -> Measurement:
    """Plays all plans on one template."""
    codec = load_template_codec(name)
    measured = Measurement(name)
    _measure_shapes(codec, measured)
    if not measured.shapes:
        return measured
    oracle = PlainRenderer(codec)
    measured.drops_results = _drops_results(oracle)
    for seed in _GROWING_SEEDS:
        _play(codec, oracle, measured, seed, _GROWING_STEPS, is_growing=True)
    _play(codec, oracle, measured, 0, _GROWING_STEPS, is_growing=True, with_tools=False)
    for seed in _AGENT_SEEDS:
        _play(codec, oracle, measured, seed, _AGENT_STEPS, is_growing=False)
    for seed in _GROWING_SEEDS:
        _play(codec, oracle, measured, seed, _GROWING_STEPS, is_growing=True, history="verbatim")
    return measured


measure_once = cache(measure_template)


def reply_of_shape(text: bool, reasoning: bool, calls: int) -> Message:
    """Returns a reply with or without text and reasoning, and with a number of calls."""
    made = tuple(
        ToolCall("work", f'{{"n": {n}, "do": "zqdo{n}", "deep": true}}', f"zqcall0{n}") for n in range(calls)
    )
    return Message("assistant", "zqsaid" * text, reasoning_content="zqthought" * reasoning, tool_calls=made)


def _measure_shapes(codec: GenericCodec, measured: Measurement) -> None:
    encoder = ProbedReplyEncoder(codec, Random(0), tools=PLAN_TOOLS, vary_tokenization=False)
    shapes, unread = [], []
    for reasoning, text, calls in product((False, True), (True, False), (0, 1, 2)):
        if not text and not calls:
            continue
        message = reply_of_shape(text, reasoning, calls)
        words = "reasoning" * reasoning, "text" * text, ("", "call", "calls")[calls]
        shape = "+".join(filter(None, words))
        if encoder.can_express(message):
            shapes.append(shape)
        elif encoder.shown_text(message) is not None and not (
            encoder.can_express(reply_of_shape(text, True, calls))
        ):
            # A template whose generation prompt opens reasoning has no reply without it.
            unread.append(shape)
        refusal = _refusal(codec, message)
        if refusal and not reasoning:
            measured.refused_shapes[shape] = refusal
    measured.shapes, measured.unread_shapes = tuple(shapes), tuple(unread)


def _drops_results(oracle: PlainRenderer) -> bool:
    messages = [_USER, reply_of_shape(False, False, 1), Message("tool", "zqseen", tool_call_id="zqcall00")]
    is_accepted = oracle.accepts(messages, PLAN_TOOLS)
    return is_accepted and "zqseen" not in oracle.render(messages, PLAN_TOOLS)


def _refusal(codec: GenericCodec, message: Message) -> str:
    """Returns the template's message if it refuses a reply with its results, or an empty text."""
    results = [Message("tool", "zqseen", tool_call_id=call.id, name=call.name) for call in message.tool_calls]
    tools = PLAN_TOOLS if message.tool_calls else ()
    try:
        codec.probe(tools=bool(tools)).render([_USER, message, *results], [dict(tool) for tool in tools])
    except TemplateError as error:
        return str(error)
    return ""


def _play(
    codec: GenericCodec,
    oracle: PlainRenderer,
    measured: Measurement,
    seed: int,
    steps: int,
    *,
    is_growing: bool,
    with_tools: bool = True,
    history: HistoryPolicy = "template",
) -> None:
    rng = Random(seed)
    encoder = ProbedReplyEncoder(codec, Random(seed), tools=PLAN_TOOLS)
    generator = PlanGenerator(
        Random(seed),
        reasoning=True,
        can_express=lambda reply: (with_tools or not reply.tool_calls) and encoder.can_express(reply),
        with_system=oracle.accepts([_SYSTEM, _USER]),
        with_tools=with_tools and oracle.accepts([_USER], PLAN_TOOLS),
    )
    plan = generator.generate(steps, only=[] if is_growing else None)
    session = Session("s", codec, history=history, started_at=codec.now)
    runner = RecordingRunner(session, encoder)
    if is_growing:
        runner.run(plan)
    else:
        runner.run(plan, causal_order(plan, rng), overlap=rng)
    measured.refused_calls += len(runner.rejected)
    measured.refusals.update(runner.rejections)
    for executed in runner.executed:
        extended = runner.extended[executed.planned.index]
        measured.calls += 1
        measured.exact_calls += _is_exact(session, executed)
        if history == "verbatim":
            measured.verbatim_forks += bool(extended.extension.rewrite_reason)
            continue
        measured.continuing_calls += any(node.sampled_ids is not None for node in extended.path)
        shown = [node.message for node in session.tree.nodes[executed.call.prompt_node].path()]
        prompt, plain = codec.decode(executed.prompt_ids), oracle.render(shown, executed.planned.tools)
        if oracle.normalize(prompt) != oracle.normalize(plain):
            measured.corrupted.append(_difference(oracle.normalize(prompt), oracle.normalize(plain)))
        if extended.extension.rewrite_reason:
            measured.forks.append(_judge_fork(codec, oracle, extended, is_growing))


def _is_exact(session: Session, executed: ExecutedCall) -> bool:
    """Whether every output follows exactly the ids that the engine got."""
    tree = session.tree
    return all(
        tree.path_ids(tree.nodes[node]).tolist() == [*executed.prompt_ids.tolist(), *ids.tolist()]
        for node, ids in zip(executed.call.outputs, executed.outputs, strict=True)
    )


def _judge_fork(
    codec: GenericCodec, oracle: PlainRenderer, extended: _ExtendedPath, is_growing: bool
) -> Fork:
    """Returns the fork of a prompt. It is needless if the template shows the path up to and including the
    reply at which it forked: replies apart from whitespace and style, everything else exactly."""
    entries: list[PromptMessage] = [*extended.path, *extended.new]
    messages = [entry.message for entry in entries]
    text = oracle.render(messages, extended.tools)
    rendered = oracle.normalize(text)
    kept = extended.extension.kept
    # A prompt may fork before the message that changed, if rendering that one changes an earlier one.
    is_reply = extended.path[kept].sampled_ids is not None
    forked = extended.path[: kept + 1] if is_reply else extended.path
    recorded = oracle.normalize("".join(codec.decode(node.ids) for node in forked))
    # Without a stop token nothing in the text shows where a reply ends.
    has_end = extended.extension.rewrite_reason != RewriteReason.NO_TERMINATOR
    is_needless = has_end and rendered.startswith(recorded) and _shows_context(codec, oracle, text, forked)
    return Fork(
        str(extended.extension.rewrite_reason),
        is_needless,
        messages[-1].role,
        is_growing,
        "" if is_needless else _difference(recorded, rendered),
    )


def _shows_context(
    codec: GenericCodec, oracle: PlainRenderer, text: str, path: Sequence[PathMessage]
) -> bool:
    """Whether a text has everything of a path that was not sampled, in order and with its whitespace. An
    empty block of reasoning in the generation prompt may be missing."""
    cursor = 0
    prompts = {codec.profile(tools=tools).traits.generation_prompt for tools in (False, True)}
    # The generation prompt of the next reply is not what precedes an earlier one.
    for prompt in prompts:
        text = text.removesuffix(prompt)
    for node in path:
        sampled = node.sampled_ids if node.ends_sampled else None
        context = codec.decode(node.ids[: len(node.ids) - (len(sampled) if sampled is not None else 0)])
        context = codec.segment_encoder.normalize(context)
        start = text.find(context, cursor)
        if start < 0 and oracle.prompt_has_empty_reasoning:
            for prompt in prompts:
                context = context.removesuffix(prompt)
            start = text.find(context, cursor)
        if start < 0:
            return False
        cursor = start + len(context)
    return True


def _difference(one: str, other: str) -> str:
    start = next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )
    return f"{one[max(0, start - 30) : start + 40]!r} against {other[max(0, start - 30) : start + 40]!r}"
