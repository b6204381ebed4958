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
from branchline.core.message import Form, Message, ToolCall
from branchline.timelines.causes import Cause


@dataclass(frozen=True)
class PlannedOutput:
    """What the model will say, and whether it gets to the end of it."""

    message: Message
    stop: bool = True


@dataclass(frozen=True)
class PlannedCall:
    """One call of a plan."""

    index: int
    agent: str
    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...]
    outputs: tuple[PlannedOutput, ...]
    needs: frozenset[int]
    truth: Cause | None = None
    delivery: Delivery = Delivery.DELIVERED
    retry: int = 0


@dataclass
class Conversation:
    """What one agent believes was said, and which calls it learnt that from."""

    agent: str
    messages: list[Message]
    tools: tuple[Mapping[str, Any], ...]
    needs: set[int] = field(default_factory=set)
    cause: Cause | None = None
    """Why the next call opens a branch."""

    def fork(self) -> Conversation:
        return Conversation(self.agent, self.messages[:], self.tools, set(self.needs), self.cause)


def _tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}


@dataclass(frozen=True)
class Manners:
    """What a model's replies may look like; not every format can say everything."""

    most_calls: int = 2
    text_beside_calls: bool = True
    mangle: bool = True
    """Clients send replies back in their own spelling."""


class Behaviour:
    """Draws agent behaviours; every text it makes is new, so nothing matches by chance."""

    def __init__(self, rng: Random, *, reasoning: bool = False, manners: Manners | None = None) -> None:
        self._rng = rng
        self._reasoning = reasoning
        self._manners = manners or Manners()
        self._count = 0
        self.calls: list[PlannedCall] = []

    def plan(self, steps: int, *, only: Sequence[Cause] | None = None) -> list[PlannedCall]:
        """A whole episode: a main conversation in which things happen."""
        talk = Conversation(
            "", [Message("system", "You are the main agent.")], (_tool("work"), _tool("spawn"))
        )
        talk.messages.append(Message("user", self._words("task")))
        self._turn(talk)
        actions = self._actions()
        chosen = [actions[cause] for cause in (only if only is not None else actions)]
        for _ in range(steps):
            self._rng.choice([self._go_on, *chosen])(talk)
        self._go_on(talk)
        return self.calls

    def _actions(self) -> dict[Cause, Callable[[Conversation], None]]:
        return {
            Cause.BEST_OF_N: self._best_of_n,
            Cause.TWIN: self._twin,
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

    def _words(self, kind: str) -> str:
        self._count += 1
        return f"{kind} {self._count} " + "".join(self._rng.choice("abcdefgh ") for _ in range(24)) + "."

    def _reply(self, *, calls: int = 0) -> PlannedOutput:
        made = tuple(
            ToolCall(
                "work",
                json.dumps({"n": self._count, "do": self._words("do"), "deep": True}),
                self._words("id"),
            )
            for _ in range(calls)
        )
        beside = self._manners.text_beside_calls and self._rng.random() < 0.7
        text = self._words("reply") if not made or beside else ""
        reasoning = self._words("thought") if self._reasoning and self._rng.random() < 0.7 else ""
        return PlannedOutput(
            Message("assistant", text, reasoning=reasoning, calls=made), self._rng.random() > 0.1
        )

    # -- calls -------------------------------------------------------------------------------------------

    def _call(
        self,
        talk: Conversation,
        *outputs: PlannedOutput,
        truth: Cause | None = None,
        delivery: Delivery = Delivery.DELIVERED,
        retry: int = 0,
        needs: frozenset[int] = frozenset(),
    ) -> int:
        call = PlannedCall(
            len(self.calls),
            talk.agent,
            tuple(talk.messages),
            talk.tools,
            outputs or (self._reply(),),
            frozenset(talk.needs) | needs,
            truth or talk.cause,
            delivery,
            retry,
        )
        self.calls.append(call)
        talk.cause = None
        return call.index

    def _see(self, talk: Conversation, call: int, choice: int = 0) -> Message:
        """The agent takes an output into its history, in whatever way its framework writes it."""
        output = self.calls[call].outputs[choice]
        said = output.message
        shown = _mangled(said, self._rng) if self._manners.mangle else said
        talk.messages.append(shown)
        talk.needs.add(call)
        return shown

    def _answer(self, talk: Conversation, shown: Message) -> None:
        """What follows a reply: results of its tool calls, or the user's next words."""
        results = [Message("tool", self._words("result"), answers=call.id) for call in shown.calls]
        talk.messages += results or [Message("user", self._words("ask"))]

    def _turn(self, talk: Conversation, **about: Any) -> int:
        calls = min(self._rng.choice((0, 0, 1, 1, 2)), self._manners.most_calls)
        call = self._call(talk, self._reply(calls=calls), **about)
        self._answer(talk, self._see(talk, call))
        return call

    def _go_on(self, talk: Conversation) -> None:
        self._turn(talk)

    # -- behaviours --------------------------------------------------------------------------------------

    def _best_of_n(self, talk: Conversation) -> None:
        count = self._rng.randint(2, 4)
        if self._rng.random() < 0.5:
            call = self._call(talk, *(self._reply() for _ in range(count)), truth=Cause.BEST_OF_N)
            picked = (call, self._rng.randrange(count))
        else:
            calls = [self._call(talk, truth=Cause.BEST_OF_N) for _ in range(count)]
            picked = (self._rng.choice(calls), 0)
        self._answer(talk, self._see(talk, *picked))

    def _twin(self, talk: Conversation) -> None:
        reply = self._reply()
        calls = [self._call(talk, reply, truth=Cause.TWIN) for _ in range(2)]
        self._answer(talk, self._see(talk, self._rng.choice(calls)))

    def _retry(self, talk: Conversation) -> None:
        known = self._rng.random() < 0.5
        first = self._call(talk, truth=Cause.RETRY, delivery=Delivery.LOST if known else Delivery.PENDING)
        # The second is sent because the first did not come back, but may be recorded before it.
        second = self._call(talk, truth=Cause.RETRY, retry=0 if known else 1, needs=frozenset({first}))
        self._answer(talk, self._see(talk, second))

    def _cancelled(self, talk: Conversation) -> None:
        cut = PlannedOutput(self._reply().message, stop=False)
        first = self._call(talk, cut, truth=Cause.CANCELLED, delivery=Delivery.CANCELLED)
        second = self._call(talk, truth=Cause.CANCELLED, needs=frozenset({first}))
        self._answer(talk, self._see(talk, second))

    def _repair_loop(self, talk: Conversation) -> None:
        aside = talk.fork()
        bad = self._call(aside)
        self._see(aside, bad)
        aside.messages.append(Message("user", self._words("error: invalid arguments")))
        good = self._call(aside)
        self._answer(talk, self._see(talk, good))
        talk.needs |= aside.needs
        self._turn(talk, truth=Cause.REPAIR_LOOP)

    def _edit(self, talk: Conversation) -> None:
        places = [
            place for place, message in enumerate(talk.messages) if message.role in ("user", "assistant")
        ]
        place = self._rng.choice(places[-4:])
        old = talk.messages[place]
        talk.messages[place] = Message(old.role, self._words("rewritten and now longer than it was before"))
        if old.calls:
            while place + 1 < len(talk.messages) and talk.messages[place + 1].role == "tool":
                del talk.messages[place + 1]
        if talk.messages[-1].role == "assistant":
            talk.messages.append(Message("user", self._words("ask")))
        self._turn(talk, truth=Cause.EDIT)

    def _context_delete(self, talk: Conversation) -> None:
        tools = [place for place, message in enumerate(talk.messages) if message.role == "tool"][:-1]
        if len(talk.messages) < 6:
            return
        if tools and self._rng.random() < 0.5:
            place = self._rng.choice(tools[-4:])
            old = talk.messages[place]
            if old.text == "[gone]":
                return
            talk.messages[place] = Message("tool", "[gone]", answers=old.answers)
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
        self._turn(talk, truth=Cause.CONTEXT_DELETE)

    def _compaction(self, talk: Conversation) -> None:
        ask = talk.fork()
        ask.messages.append(Message("user", self._words("summarise what happened")))
        summary = self._call(
            ask, PlannedOutput(Message("assistant", self._words("in short it went like this")))
        )
        said = self.calls[summary].outputs[0].message.text
        talk.needs |= ask.needs | {summary}
        talk.messages = [talk.messages[0], Message("user", f"Earlier: {said} Go on.")]
        self._turn(talk, truth=Cause.COMPACTION)

    def _sub_agent(self, talk: Conversation) -> None:
        if not self._manners.most_calls:
            return
        task = self._words("look into this matter")
        spawn = Message(
            "assistant", "", calls=(ToolCall("spawn", json.dumps({"task": task}), self._words("id")),)
        )
        call = self._call(talk, PlannedOutput(spawn))
        self._see(talk, call)
        name = self._rng.choice(("", f"helper-{self._count}"))
        sub = Conversation(
            name, [Message("system", f"You are a helper. {self._words('rules')}")], (_tool("work"),)
        )
        sub.messages.append(Message("user", task))
        sub.needs = {call}
        sub.cause = Cause.SUB_AGENT
        for _ in range(self._rng.randint(1, 3)):
            last = self._turn(sub)
        talk.needs |= sub.needs
        result = self.calls[last].outputs[0].message.text or "done"
        talk.messages.append(Message("tool", f"It says: {result}", answers=spawn.calls[0].id))

    def _side_call(self, talk: Conversation) -> None:
        task = next(message.text for message in talk.messages if message.role == "user")
        ask = Message("user", f"Write a title of three words for: {task} {self._words('please')}")
        side = Conversation("", [Message("system", "You write titles."), ask], ())
        side.needs = {0}
        self._call(side, truth=Cause.SIDE_CALL)

    def _tools_changed(self, talk: Conversation) -> None:
        talk.tools = (*talk.tools[:2], _tool(f"extra{len(self.calls)}"))
        self._turn(talk, truth=Cause.TOOLS_CHANGED)


def _mangled(said: Message, rng: Random) -> Message:
    """A reply as a client sends it back: the same meaning, written differently."""
    calls = list(said.calls)
    form = 0
    if calls:
        if rng.random() < 0.3:
            calls = [ToolCall(call.name, _respelled(call.arguments, rng), call.id) for call in calls]
        if len(calls) > 1 and rng.random() < 0.3:
            calls.reverse()
    if not said.text and rng.random() < 0.5:
        form |= rng.choice((Form.NULL_CONTENT, Form.NO_CONTENT))
    elif rng.random() < 0.2:
        form |= Form.PART_LIST
    text = said.text if rng.random() < 0.8 else f" {said.text}\n"
    reasoning = said.reasoning if rng.random() < 0.5 else ""
    return Message("assistant", text, reasoning=reasoning, calls=tuple(calls), form=int(form))


def _respelled(arguments: str, rng: Random) -> str:
    value = json.loads(arguments)
    if rng.random() < 0.3:
        return repr(value)
    return json.dumps(dict(reversed(value.items())), separators=(",", ":"))
