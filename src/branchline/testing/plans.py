"""Random agent behaviour as plans: the calls of an agent, their messages, their outputs and their causes.

A plan is pure data. Each planned call lists the calls it depends on, so that a runner can execute the plan
in any causally possible order, and the expected cause of the branch it opens.

    plan = PlanGenerator(random.Random(7)).generate(steps=12)
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from branchline.core.call import Delivery
from branchline.core.message import Message, ToolCall
from branchline.testing.reply_variants import echo_as_client, similar_replies
from branchline.timelines.causes import Cause


@dataclass(frozen=True)
class PlannedOutput:
    """An output of the model, and whether it is complete or was cut off."""

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
    """The history of one agent, and the calls that it depends on."""

    agent: str
    messages: list[Message]
    tools: tuple[Mapping[str, Any], ...]
    depends_on: set[int] = field(default_factory=set)
    next_cause: Cause | None = None
    """The expected cause of the branch that the next call opens."""

    def copy(self) -> ScriptedConversation:
        return ScriptedConversation(
            self.agent, self.messages[:], self.tools, set(self.depends_on), self.next_cause
        )


_PROPERTIES = {
    "n": {"type": "integer", "description": "a number"},
    "do": {"type": "string", "description": "what to do"},
    "deep": {"type": "boolean", "description": "whether to go deep"},
    "task": {"type": "string", "description": "the task of a helper"},
}


def _tool(name: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": _PROPERTIES, "required": []}
    function = {"name": name, "description": f"The tool {name}.", "parameters": parameters}
    return {"type": "function", "function": function}


@dataclass(frozen=True)
class ReplyStyle:
    """Which replies a plan contains; not every model format can express all of them."""

    max_tool_calls: int = 2
    text_with_tool_calls: bool = True
    reserialize_echoes: bool = True
    """Whether clients change the form of replies that they send back."""


class PlanGenerator:
    """Generates plans. Every generated text is unique, so nothing matches by chance."""

    def __init__(
        self,
        rng: Random,
        *,
        reasoning: bool = False,
        style: ReplyStyle | None = None,
        can_express: Callable[[Message], bool] = lambda _: True,
        with_system: bool = True,
        with_tools: bool = True,
        with_names: bool | None = None,
        races: bool = True,
    ) -> None:
        """`can_express` tells whether the model's format can express a reply; one that it cannot is replaced
        by the most similar one that it can. Some templates refuse system messages or tools. `with_names` says
        whether agents beside the main one have names; by default some have. Without `races` an agent waits
        for all candidates before it continues one."""
        self._with_names = with_names
        self._races = races
        self._task = ""
        self._shown: list[tuple[Message, tuple[int, int]]] = []
        """Each shown reply with its call and choice."""
        self.main_answers: list[tuple[int, int]] = []
        """The answers of the main conversation as it ended: calls and choices."""
        self._with_system = with_system
        self._with_tools = with_tools
        self._can_express = can_express
        self._rng = rng
        self._reasoning = reasoning
        self._style = style or ReplyStyle()
        self._count = 0
        self.calls: list[PlannedCall] = []

    def generate(
        self, steps: int, *, only: Sequence[Cause] | None = None, ending: Cause | None = None
    ) -> list[PlannedCall]:
        """Returns the calls of an episode: a main conversation with random actions. It ends with a turn of
        the main agent, which the action of the cause `ending` may follow."""
        conversation = self._start("", "You are the main agent.", (_tool("work"), _tool("spawn")))
        self._task = self._unique_text("task")
        conversation.messages.append(Message("user", self._task))
        self._turn(conversation)
        actions = self._actions()
        chosen = [actions[cause] for cause in (only if only is not None else actions)]
        for _ in range(steps):
            self._rng.choice([self._turn, *chosen])(conversation)
        self._turn(conversation)
        if ending is not None:
            actions[ending](conversation)
        self.main_answers = self._answers(conversation)
        return self.calls

    def _start(self, agent: str, system: str, tools: tuple[Mapping[str, Any], ...]) -> ScriptedConversation:
        messages = [Message("system", system)] if self._with_system else []
        return ScriptedConversation(agent, messages, tools if self._with_tools else ())

    def _actions(self) -> dict[Cause, Callable[[ScriptedConversation], object]]:
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
            Cause.OTHER_SYSTEM_PROMPT: self._critic,
            Cause.TOOLS_CHANGED: self._tools_changed,
        }

    # -- texts -------------------------------------------------------------------------------------------

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
        with_text = self._style.text_with_tool_calls and self._rng.random() < 0.7
        text = self._unique_text("reply") if not made or with_text else ""
        reasoning = self._unique_text("thought") if self._reasoning and self._rng.random() < 0.7 else ""
        message = Message("assistant", text, reasoning_content=reasoning, tool_calls=made)
        return PlannedOutput(self._expressible(message), self._rng.random() > 0.1)

    def _expressible(self, message: Message) -> Message:
        """Returns the reply, or the most similar one that the model's format can express."""
        if self._can_express(message):
            return message
        other_text, other_reasoning = self._unique_text("reply"), self._unique_text("thought")
        candidates = similar_replies(message, other_text, other_reasoning)
        return next(filter(self._can_express, candidates), message)

    # -- calls -------------------------------------------------------------------------------------------

    def _add_call(
        self,
        conversation: ScriptedConversation,
        *outputs: PlannedOutput,
        expected_cause: Cause | None = None,
        delivery: Delivery = Delivery.DELIVERED,
        retry: int = 0,
        depends_on: frozenset[int] = frozenset(),
    ) -> int:
        call = PlannedCall(
            len(self.calls),
            conversation.agent,
            tuple(conversation.messages),
            conversation.tools,
            outputs or (self._reply(),),
            frozenset(conversation.depends_on) | depends_on,
            expected_cause or conversation.next_cause,
            delivery,
            retry,
        )
        self.calls.append(call)
        conversation.next_cause = None
        return call.index

    def _append_output(self, conversation: ScriptedConversation, call: int, choice: int = 0) -> Message:
        """Adds an output to the agent's history in the form in which a client sends it back."""
        output = self.calls[call].outputs[choice].message
        shown = echo_as_client(output, self._rng) if self._style.reserialize_echoes else output
        conversation.messages.append(shown)
        conversation.depends_on.add(call)
        self._shown.append((shown, (call, choice)))
        return shown

    def _answers(self, conversation: ScriptedConversation) -> list[tuple[int, int]]:
        """Returns the calls and choices of the replies that a history shows."""
        answers = {id(shown): answer for shown, answer in self._shown}
        return [answers[id(message)] for message in conversation.messages if id(message) in answers]

    def _append_results(self, conversation: ScriptedConversation, shown: Message) -> None:
        """Adds the results of a reply's tool calls, or the next user message."""
        results = [
            Message("tool", self._unique_text("result"), tool_call_id=call.id) for call in shown.tool_calls
        ]
        conversation.messages += results or [Message("user", self._unique_text("ask"))]

    def _turn(self, conversation: ScriptedConversation, expected_cause: Cause | None = None) -> int:
        calls = min(self._rng.choice((0, 0, 1, 1, 2)), self._style.max_tool_calls)
        call = self._add_call(conversation, self._reply(calls=calls), expected_cause=expected_cause)
        self._append_results(conversation, self._append_output(conversation, call))
        return call

    def _wait_for(self, conversation: ScriptedConversation, calls: Sequence[int]) -> None:
        if not self._races:
            conversation.depends_on |= set(calls)

    def _name(self, kind: str) -> str:
        """Returns the name of another agent."""
        name = f"{kind}-{self._count}"
        if self._with_names is None:
            return self._rng.choice(("", name))
        return name if self._with_names else ""

    # -- actions -----------------------------------------------------------------------------------------

    def _best_of_n(self, conversation: ScriptedConversation) -> None:
        count = self._rng.randint(2, 4)
        if self._rng.random() < 0.5:
            call = self._add_call(
                conversation, *(self._reply() for _ in range(count)), expected_cause=Cause.BEST_OF_N
            )
            picked = (call, self._rng.randrange(count))
        else:
            calls = [self._add_call(conversation, expected_cause=Cause.BEST_OF_N) for _ in range(count)]
            picked = (self._rng.choice(calls), 0)
            self._wait_for(conversation, calls)
        self._append_results(conversation, self._append_output(conversation, *picked))

    def _duplicate(self, conversation: ScriptedConversation) -> None:
        reply = self._reply()
        calls = [self._add_call(conversation, reply, expected_cause=Cause.DUPLICATE) for _ in range(2)]
        self._wait_for(conversation, calls)
        self._append_results(conversation, self._append_output(conversation, self._rng.choice(calls)))

    def _retry(self, conversation: ScriptedConversation) -> None:
        known = self._rng.random() < 0.5
        first = self._add_call(
            conversation, expected_cause=Cause.RETRY, delivery=Delivery.LOST if known else Delivery.PENDING
        )
        # The client sends the second call because the first did not return.
        second = self._add_call(
            conversation, expected_cause=Cause.RETRY, retry=0 if known else 1, depends_on=frozenset({first})
        )
        self._append_results(conversation, self._append_output(conversation, second))

    def _cancelled(self, conversation: ScriptedConversation) -> None:
        cut = PlannedOutput(self._reply().message, is_complete=False)
        first = self._add_call(conversation, cut, expected_cause=Cause.CANCELLED, delivery=Delivery.CANCELLED)
        second = self._add_call(conversation, expected_cause=Cause.CANCELLED, depends_on=frozenset({first}))
        self._append_results(conversation, self._append_output(conversation, second))

    def _repair_loop(self, conversation: ScriptedConversation) -> None:
        aside = conversation.copy()
        bad = self._add_call(aside)
        self._append_output(aside, bad)
        aside.messages.append(Message("user", self._unique_text("error: invalid arguments")))
        good = self._add_call(aside)
        self._append_results(conversation, self._append_output(conversation, good))
        conversation.depends_on |= aside.depends_on
        self._turn(conversation, expected_cause=Cause.REPAIR_LOOP)

    def _edit(self, conversation: ScriptedConversation) -> None:
        indexes = [
            index
            for index, message in enumerate(conversation.messages)
            if message.role in ("user", "assistant")
        ]
        index = self._rng.choice(indexes[-4:])
        old = conversation.messages[index]
        conversation.messages[index] = Message(
            old.role, self._unique_text("rewritten and now longer than it was before")
        )
        if old.tool_calls:
            while index + 1 < len(conversation.messages) and conversation.messages[index + 1].role == "tool":
                del conversation.messages[index + 1]
        if conversation.messages[-1].role == "assistant":
            conversation.messages.append(Message("user", self._unique_text("ask")))
        self._turn(conversation, expected_cause=Cause.EDIT)

    def _context_delete(self, conversation: ScriptedConversation) -> None:
        tools = [index for index, message in enumerate(conversation.messages) if message.role == "tool"][:-1]
        if len(conversation.messages) < 6:
            return
        if tools and self._rng.random() < 0.5:
            index = self._rng.choice(tools[-4:])
            old = conversation.messages[index]
            if old.content == "[gone]":
                return
            conversation.messages[index] = Message("tool", "[gone]", tool_call_id=old.tool_call_id)
        else:
            start = self._rng.randrange(2, len(conversation.messages) - 3)
            while conversation.messages[start].role == "tool":
                start -= 1
            end = start + 1
            while conversation.messages[end].role == "tool":
                end += 1
            if end > len(conversation.messages) - 4:
                return
            del conversation.messages[start:end]
        self._turn(conversation, expected_cause=Cause.CONTEXT_DELETE)

    def _compaction(self, conversation: ScriptedConversation) -> None:
        ask = conversation.copy()
        ask.messages.append(Message("user", self._unique_text("summarise what happened")))
        summary = self._add_call(
            ask,
            PlannedOutput(
                self._expressible(Message("assistant", self._unique_text("in short it went like this")))
            ),
        )
        text = self.calls[summary].outputs[0].message.content
        conversation.depends_on |= ask.depends_on | {summary}
        system = conversation.messages[:1] if self._with_system else []
        conversation.messages = [*system, Message("user", f"Earlier: {text} Go on.")]
        self._turn(conversation, expected_cause=Cause.COMPACTION)

    def _sub_agent(self, conversation: ScriptedConversation) -> None:
        if not self._style.max_tool_calls:
            return
        task = self._unique_text("look into this matter")
        spawn = self._expressible(
            Message(
                "assistant",
                "",
                tool_calls=(ToolCall("spawn", json.dumps({"task": task}), self._unique_text("id")),),
            )
        )
        if not spawn.tool_calls:
            return
        call = self._add_call(conversation, PlannedOutput(spawn))
        self._append_output(conversation, call)
        sub = self._start(
            self._name("helper"), f"You are a helper. {self._unique_text('rules')}", (_tool("work"),)
        )
        sub.messages.append(Message("user", task))
        sub.depends_on = {call}
        sub.next_cause = Cause.SUB_AGENT
        for _ in range(self._rng.randint(1, 3)):
            last = self._turn(sub)
        conversation.depends_on |= sub.depends_on
        result = self.calls[last].outputs[0].message.content or "done"
        conversation.messages.append(
            Message("tool", f"It says: {result}", tool_call_id=spawn.tool_calls[0].id)
        )

    def _side_call(self, conversation: ScriptedConversation) -> None:
        ask = Message("user", f"Write a title of three words for: {self._task} {self._unique_text('please')}")
        side = self._start("", "You write titles.", ())
        side.messages.append(ask)
        # Some clients ask for the title before the work begins.
        side.depends_on = self._rng.choice((set(), {0}))
        self._add_call(side, expected_cause=Cause.SIDE_CALL)

    def _critic(self, conversation: ScriptedConversation) -> None:
        """Another conversation, in which a critic judges the latest answer; some critics ask back."""
        if not self._with_system:
            return
        call, choice = (self._answers(conversation) or [(0, 0)])[-1]
        answer = self.calls[call].outputs[choice].message
        name = self._name("critic")
        critic = self._start(name, f"You are a critic. {self._unique_text('rules')}", (_tool("work"),))
        quoted = answer.content or (answer.tool_calls[0].arguments if answer.tool_calls else "nothing")
        critic.messages.append(Message("user", f"Judge this answer: {quoted} {self._unique_text('please')}"))
        critic.depends_on = {call}
        critic.next_cause = Cause.SUB_AGENT if name else Cause.OTHER_SYSTEM_PROMPT
        for _ in range(self._rng.randint(1, 3)):
            self._turn(critic)

    def _tools_changed(self, conversation: ScriptedConversation) -> None:
        if not self._with_tools:
            return
        conversation.tools = (*conversation.tools[:2], _tool(f"extra{len(self.calls)}"))
        self._turn(conversation, expected_cause=Cause.TOOLS_CHANGED)
