"""Random agent behaviours as plans: which calls an agent makes, what it shows, what it gets, and why.

A plan is pure data. Each planned call lists the calls it `needs` to have seen, so that a player may run
the plan in any causally possible order, and carries the `truth`: the cause of the branch it opens.

    plan = Behaviour(random.Random(7)).plan(steps=12)
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from branchline.core.call import Delivery
from branchline.core.message import Message, ToolCall, WireShape
from branchline.timelines.causes import Cause


@dataclass(frozen=True)
class PlannedOutput:
    """What the model will say, and whether it gets to the end of it."""

    message: Message
    is_complete: bool = True


@dataclass(frozen=True)
class PlannedCall:
    """One call of a plan."""

    index: int
    agent: str
    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...]
    outputs: tuple[PlannedOutput, ...]
    depends_on: frozenset[int]
    expected_cause: Cause | None = None
    delivery: Delivery = Delivery.DELIVERED
    retry: int = 0


@dataclass
class ScriptedConversation:
    """What one agent believes was said, and which calls it learnt that from."""

    agent: str
    messages: list[Message]
    tools: tuple[Mapping[str, Any], ...]
    depends_on: set[int] = field(default_factory=set)
    next_cause: Cause | None = None
    """Why the next call opens a branch."""

    def copy(self) -> ScriptedConversation:
        return ScriptedConversation(
            self.agent, self.messages[:], self.tools, set(self.depends_on), self.next_cause
        )


def _tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}


@dataclass(frozen=True)
class ReplyStyle:
    """What a model's replies may look like; not every format can say everything."""

    max_tool_calls: int = 2
    text_with_tool_calls: bool = True
    reserialize_echoes: bool = True
    """Clients send replies back in their own spelling."""


class PlanGenerator:
    """Draws agent behaviours; every text it makes is new, so nothing matches by chance."""

    def __init__(self, rng: Random, *, reasoning: bool = False, style: ReplyStyle | None = None) -> None:
        self._rng = rng
        self._reasoning = reasoning
        self._style = style or ReplyStyle()
        self._count = 0
        self.calls: list[PlannedCall] = []

    def generate(self, steps: int, *, only: Sequence[Cause] | None = None) -> list[PlannedCall]:
        """A whole episode: a main conversation in which things happen."""
        talk = ScriptedConversation(
            "", [Message("system", "You are the main agent.")], (_tool("work"), _tool("spawn"))
        )
        talk.messages.append(Message("user", self._unique_text("task")))
        self._turn(talk)
        actions = self._actions()
        chosen = [actions[cause] for cause in (only if only is not None else actions)]
        for _ in range(steps):
            self._rng.choice([self._continue, *chosen])(talk)
        self._continue(talk)
        return self.calls

    def _actions(self) -> dict[Cause, Callable[[ScriptedConversation], None]]:
        return {
            Cause.BEST_OF_N: self._best_of_n,
            Cause.DUPLICATE: self._duplicate,
            Cause.RETRY: self._retry,
            Cause.CANCELLED: self._cancelled,
            Cause.REPAIR_LOOP: self._repair_loop,
            Cause.EDIT: self._edit,
            Cause.CONTEXT_DELETE: self._context_delete,
            Cause.COMPACTION: self._compaction,
            Cause.SUB_AGENT: self._sub_agent,
            Cause.SIDE_CALL: self._side_call,
            Cause.TOOLS_CHANGED: self._tools_changed,
        }

    # -- words -------------------------------------------------------------------------------------------

    def _unique_text(self, kind: str) -> str:
        self._count += 1
        return f"{kind} {self._count} " + "".join(self._rng.choice("abcdefgh ") for _ in range(24)) + "."

    def _reply(self, *, calls: int = 0) -> PlannedOutput:
        made = tuple(
            ToolCall(
                "work",
                json.dumps({"n": self._count, "do": self._unique_text("do"), "deep": True}),
                self._unique_text("id"),
            )
            for _ in range(calls)
        )
        beside = self._style.text_with_tool_calls and self._rng.random() < 0.7
        text = self._unique_text("reply") if not made or beside else ""
        reasoning = self._unique_text("thought") if self._reasoning and self._rng.random() < 0.7 else ""
        return PlannedOutput(
            Message("assistant", text, reasoning_content=reasoning, tool_calls=made), self._rng.random() > 0.1
        )

    # -- calls -------------------------------------------------------------------------------------------

    def _add_call(
        self,
        talk: ScriptedConversation,
        *outputs: PlannedOutput,
        expected_cause: Cause | None = None,
        delivery: Delivery = Delivery.DELIVERED,
        retry: int = 0,
        depends_on: frozenset[int] = frozenset(),
    ) -> int:
        call = PlannedCall(
            len(self.calls),
            talk.agent,
            tuple(talk.messages),
            talk.tools,
            outputs or (self._reply(),),
            frozenset(talk.depends_on) | depends_on,
            expected_cause or talk.next_cause,
            delivery,
            retry,
        )
        self.calls.append(call)
        talk.next_cause = None
        return call.index

    def _append_output(self, talk: ScriptedConversation, call: int, choice: int = 0) -> Message:
        """The agent takes an output into its history, in whatever way its framework writes it."""
        output = self.calls[call].outputs[choice]
        said = output.message
        shown = _echo_as_client(said, self._rng) if self._style.reserialize_echoes else said
        talk.messages.append(shown)
        talk.depends_on.add(call)
        return shown

    def _append_results(self, talk: ScriptedConversation, shown: Message) -> None:
        """What follows a reply: results of its tool calls, or the user's next words."""
        results = [
            Message("tool", self._unique_text("result"), tool_call_id=call.id) for call in shown.tool_calls
        ]
        talk.messages += results or [Message("user", self._unique_text("ask"))]

    def _turn(self, talk: ScriptedConversation, **about: Any) -> int:
        calls = min(self._rng.choice((0, 0, 1, 1, 2)), self._style.max_tool_calls)
        call = self._add_call(talk, self._reply(calls=calls), **about)
        self._append_results(talk, self._append_output(talk, call))
        return call

    def _continue(self, talk: ScriptedConversation) -> None:
        self._turn(talk)

    # -- behaviours --------------------------------------------------------------------------------------

    def _best_of_n(self, talk: ScriptedConversation) -> None:
        count = self._rng.randint(2, 4)
        if self._rng.random() < 0.5:
            call = self._add_call(
                talk, *(self._reply() for _ in range(count)), expected_cause=Cause.BEST_OF_N
            )
            picked = (call, self._rng.randrange(count))
        else:
            calls = [self._add_call(talk, expected_cause=Cause.BEST_OF_N) for _ in range(count)]
            picked = (self._rng.choice(calls), 0)
        self._append_results(talk, self._append_output(talk, *picked))

    def _duplicate(self, talk: ScriptedConversation) -> None:
        reply = self._reply()
        calls = [self._add_call(talk, reply, expected_cause=Cause.DUPLICATE) for _ in range(2)]
        self._append_results(talk, self._append_output(talk, self._rng.choice(calls)))

    def _retry(self, talk: ScriptedConversation) -> None:
        known = self._rng.random() < 0.5
        first = self._add_call(
            talk, expected_cause=Cause.RETRY, delivery=Delivery.LOST if known else Delivery.PENDING
        )
        # The second is sent because the first did not come back, but may be recorded before it.
        second = self._add_call(
            talk, expected_cause=Cause.RETRY, retry=0 if known else 1, depends_on=frozenset({first})
        )
        self._append_results(talk, self._append_output(talk, second))

    def _cancelled(self, talk: ScriptedConversation) -> None:
        cut = PlannedOutput(self._reply().message, is_complete=False)
        first = self._add_call(talk, cut, expected_cause=Cause.CANCELLED, delivery=Delivery.CANCELLED)
        second = self._add_call(talk, expected_cause=Cause.CANCELLED, depends_on=frozenset({first}))
        self._append_results(talk, self._append_output(talk, second))

    def _repair_loop(self, talk: ScriptedConversation) -> None:
        aside = talk.copy()
        bad = self._add_call(aside)
        self._append_output(aside, bad)
        aside.messages.append(Message("user", self._unique_text("error: invalid arguments")))
        good = self._add_call(aside)
        self._append_results(talk, self._append_output(talk, good))
        talk.depends_on |= aside.depends_on
        self._turn(talk, expected_cause=Cause.REPAIR_LOOP)

    def _edit(self, talk: ScriptedConversation) -> None:
        places = [
            place for place, message in enumerate(talk.messages) if message.role in ("user", "assistant")
        ]
        place = self._rng.choice(places[-4:])
        old = talk.messages[place]
        talk.messages[place] = Message(
            old.role, self._unique_text("rewritten and now longer than it was before")
        )
        if old.tool_calls:
            while place + 1 < len(talk.messages) and talk.messages[place + 1].role == "tool":
                del talk.messages[place + 1]
        if talk.messages[-1].role == "assistant":
            talk.messages.append(Message("user", self._unique_text("ask")))
        self._turn(talk, expected_cause=Cause.EDIT)

    def _context_delete(self, talk: ScriptedConversation) -> None:
        tools = [place for place, message in enumerate(talk.messages) if message.role == "tool"][:-1]
        if len(talk.messages) < 6:
            return
        if tools and self._rng.random() < 0.5:
            place = self._rng.choice(tools[-4:])
            old = talk.messages[place]
            if old.content == "[gone]":
                return
            talk.messages[place] = Message("tool", "[gone]", tool_call_id=old.tool_call_id)
        else:
            start = self._rng.randrange(2, len(talk.messages) - 3)
            while talk.messages[start].role == "tool":
                start -= 1
            end = start + 1
            while talk.messages[end].role == "tool":
                end += 1
            if end > len(talk.messages) - 4:
                return
            del talk.messages[start:end]
        self._turn(talk, expected_cause=Cause.CONTEXT_DELETE)

    def _compaction(self, talk: ScriptedConversation) -> None:
        ask = talk.copy()
        ask.messages.append(Message("user", self._unique_text("summarise what happened")))
        summary = self._add_call(
            ask, PlannedOutput(Message("assistant", self._unique_text("in short it went like this")))
        )
        said = self.calls[summary].outputs[0].message.content
        talk.depends_on |= ask.depends_on | {summary}
        talk.messages = [talk.messages[0], Message("user", f"Earlier: {said} Go on.")]
        self._turn(talk, expected_cause=Cause.COMPACTION)

    def _sub_agent(self, talk: ScriptedConversation) -> None:
        if not self._style.max_tool_calls:
            return
        task = self._unique_text("look into this matter")
        spawn = Message(
            "assistant",
            "",
            tool_calls=(ToolCall("spawn", json.dumps({"task": task}), self._unique_text("id")),),
        )
        call = self._add_call(talk, PlannedOutput(spawn))
        self._append_output(talk, call)
        name = self._rng.choice(("", f"helper-{self._count}"))
        sub = ScriptedConversation(
            name, [Message("system", f"You are a helper. {self._unique_text('rules')}")], (_tool("work"),)
        )
        sub.messages.append(Message("user", task))
        sub.depends_on = {call}
        sub.next_cause = Cause.SUB_AGENT
        for _ in range(self._rng.randint(1, 3)):
            last = self._turn(sub)
        talk.depends_on |= sub.depends_on
        result = self.calls[last].outputs[0].message.content or "done"
        talk.messages.append(Message("tool", f"It says: {result}", tool_call_id=spawn.tool_calls[0].id))

    def _side_call(self, talk: ScriptedConversation) -> None:
        task = next(message.content for message in talk.messages if message.role == "user")
        ask = Message("user", f"Write a title of three words for: {task} {self._unique_text('please')}")
        side = ScriptedConversation("", [Message("system", "You write titles."), ask], ())
        side.depends_on = {0}
        self._add_call(side, expected_cause=Cause.SIDE_CALL)

    def _tools_changed(self, talk: ScriptedConversation) -> None:
        talk.tools = (*talk.tools[:2], _tool(f"extra{len(self.calls)}"))
        self._turn(talk, expected_cause=Cause.TOOLS_CHANGED)


def _echo_as_client(said: Message, rng: Random) -> Message:
    """A reply as a client sends it back: the same meaning, written differently."""
    calls = list(said.tool_calls)
    form = 0
    if calls:
        if rng.random() < 0.3:
            calls = [
                ToolCall(call.name, _reserialize_arguments(call.arguments, rng), call.id) for call in calls
            ]
        if len(calls) > 1 and rng.random() < 0.3:
            calls.reverse()
    if not said.content and rng.random() < 0.5:
        form |= rng.choice((WireShape.NULL_CONTENT, WireShape.ABSENT_CONTENT))
    elif rng.random() < 0.2:
        form |= WireShape.PART_LIST
    text = said.content if rng.random() < 0.8 else f" {said.content}\n"
    reasoning = said.reasoning_content if rng.random() < 0.5 else ""
    return Message(
        "assistant", text, reasoning_content=reasoning, tool_calls=tuple(calls), wire_shape=int(form)
    )


def _reserialize_arguments(arguments: str, rng: Random) -> str:
    value = json.loads(arguments)
    if rng.random() < 0.3:
        return repr(value)
    return json.dumps(dict(reversed(value.items())), separators=(",", ":"))
