"""Agent conversations, generated before any measurement.

Each turn samples 250 tokens (text and a tool call) and observes 400 (the result and the generation prompt of
four tokens). Every call has its history as new objects, as if parsed from its own request. All token ids
differ, so the trained tokens can be counted as a set.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import msgspec
import numpy as np

from benchmarks.replay_codec import ReplayCodec
from branchline import Generation, Message, Request, Session
from branchline.chat.base import MessageTokens
from branchline.core.reader import read_message, read_messages
from branchline.core.token_arrays import Floats, Ids, Origin, as_ids
from branchline.tree.session import CommitResult

Raw = dict[str, Any]

SAMPLED_TOKENS, OBSERVED_TOKENS, GENERATION_PROMPT_TOKENS = 250, 400, 4
_SYSTEM_TOKENS, _TASK_TOKENS = 700, 300


@dataclass(frozen=True)
class Step:
    """One call: the request in the form of each side, and the output of the engine."""

    raw_messages: list[Raw]
    messages: tuple[Message, ...]
    prompt_ids: list[int]
    raw_output: Raw
    output: Message
    ids: Ids
    logprobs: Floats
    id_list: list[int]
    logprob_list: list[float]


@dataclass
class Workload:
    """The calls of an episode."""

    name: str
    steps: list[Step] = field(default_factory=list)
    message_tokens: dict[bytes, MessageTokens] = field(default_factory=dict)
    generation_prompt_ids: Ids = field(default_factory=lambda: as_ids(np.arange(GENERATION_PROMPT_TOKENS)))

    @property
    def codec(self) -> ReplayCodec:
        return ReplayCodec(self.message_tokens, self.generation_prompt_ids)

    @property
    def sampled_tokens(self) -> int:
        return sum(len(step.ids) for step in self.steps)


def run_workload(workload: Workload, session: Session | None = None, *, from_raw: bool = False) -> Session:
    """Runs every call on a session; with `from_raw`, messages are read from JSON values."""
    session = session or Session(workload.name, workload.codec)
    for step in workload.steps:
        commit_step(session, step, from_raw=from_raw)
    return session


def commit_step(session: Session, step: Step, *, from_raw: bool = False) -> CommitResult:
    messages = read_messages(step.raw_messages) if from_raw else step.messages
    output = read_message(step.raw_output) if from_raw else step.output
    turn = session.prepare(Request(messages))
    committed = session.commit(turn, Generation(step.ids, step.logprobs, message=output))
    session.record_delivery(committed.call)
    return committed


@dataclass
class _Conversation:
    """The history of one agent as wire messages and as ids."""

    raw: list[Raw]
    ids: list[int]


class _WorkloadBuilder:
    def __init__(self, name: str) -> None:
        self.workload = Workload(name)
        self._rng = Random(7)
        self._next_id = GENERATION_PROMPT_TOKENS
        self._calls = 0

    def start_conversation(self, system: str, task: str) -> _Conversation:
        conversation = _Conversation([], [])
        self._append_message(
            conversation, {"role": "system", "content": self._text(system, _SYSTEM_TOKENS)}, _SYSTEM_TOKENS
        )
        self._append_message(conversation, {"role": "user", "content": task}, _TASK_TOKENS)
        return conversation

    def new_task(self) -> str:
        return self._text("Look into this:", _TASK_TOKENS)

    def add_turn(self, conversation: _Conversation, *, candidates: int = 1, spawn: str | None = None) -> None:
        """Adds one call per candidate; the last one is continued."""
        request, prompt_ids = conversation.raw, [*conversation.ids, *range(GENERATION_PROMPT_TOKENS)]
        for _ in range(candidates):
            reply = self._reply(spawn)
            step = self._step(request, prompt_ids, reply)
            self.workload.steps.append(step)
        conversation.raw = [*request, reply]
        conversation.ids = [*prompt_ids, *step.id_list]
        result: Raw = {
            "role": "tool",
            "content": self._text("It says:", OBSERVED_TOKENS),
            "tool_call_id": reply["tool_calls"][0]["id"],
        }
        self._append_message(conversation, result, OBSERVED_TOKENS - GENERATION_PROMPT_TOKENS)

    def _append_message(self, conversation: _Conversation, raw: Raw, count: int) -> None:
        ids = self._ids(count)
        conversation.raw = [*conversation.raw, raw]
        conversation.ids = [*conversation.ids, *ids.tolist()]
        self.workload.message_tokens[read_message(raw).key] = MessageTokens(ids, ((count, Origin.CONTEXT),))

    def _reply(self, spawn: str | None) -> Raw:
        self._calls += 1
        arguments = json.dumps({"path": f"src/{self._calls}.py", "task": spawn or self._text("", 80)})
        call = {
            "id": f"call_{self._calls}",
            "type": "function",
            "function": {"name": "work", "arguments": arguments},
        }
        return {"role": "assistant", "content": self._text("I will", 150), "tool_calls": [call]}

    def _step(self, request: list[Raw], prompt_ids: list[int], reply: Raw) -> Step:
        ids = self._ids(SAMPLED_TOKENS)
        logprobs = -np.random.default_rng(self._calls).random(SAMPLED_TOKENS, np.float32)
        raw, raw_output = _json_copy(request), _json_copy(reply)
        return Step(
            raw,
            read_messages(raw),
            prompt_ids,
            raw_output,
            # The gateway records response ids, which clients do not send back.
            msgspec.structs.replace(read_message(raw_output), id=f"chatcmpl-{self._calls}"),
            ids,
            logprobs,
            ids.tolist(),
            logprobs.tolist(),
        )

    def _ids(self, count: int) -> Ids:
        ids = as_ids(np.arange(self._next_id, self._next_id + count))
        self._next_id += count
        return ids

    def _text(self, start: str, tokens: int) -> str:
        """Returns text of about this many tokens of four characters."""
        return f"{start} " + " ".join(f"{self._rng.randrange(1000):03d}" for _ in range(tokens))


def _json_copy(value: Any) -> Any:
    return msgspec.json.decode(msgspec.json.encode(value))


def long_conversation(turns: int) -> Workload:
    builder = _WorkloadBuilder(f"{turns} turns")
    conversation = builder.start_conversation("You are an agent.", builder.new_task())
    for _ in range(turns):
        builder.add_turn(conversation)
    return builder.workload


def with_sub_agents(turns: int = 60, sub_agents: int = 3, sub_turns: int = 15) -> Workload:
    builder = _WorkloadBuilder(f"{turns} turns + {sub_agents} sub-agents")
    conversation = builder.start_conversation("You are an agent.", builder.new_task())
    for turn in range(turns):
        spawns = turn % (turns // (sub_agents + 1)) == 1 and turn > sub_agents
        task = builder.new_task() if spawns else None
        builder.add_turn(conversation, spawn=task)
        if task is not None:
            helper = builder.start_conversation(f"You are helper {turn}.", task)
            for _ in range(sub_turns):
                builder.add_turn(helper)
    return builder.workload


def best_of(candidates: int = 4, turns: int = 30) -> Workload:
    builder = _WorkloadBuilder(f"best of {candidates} × {turns}")
    conversation = builder.start_conversation("You are an agent.", builder.new_task())
    for _ in range(turns):
        builder.add_turn(conversation, candidates=candidates)
    return builder.workload


ALL_WORKLOADS: tuple[Callable[[], Workload], ...] = (
    lambda: long_conversation(60),
    with_sub_agents,
    best_of,
    lambda: long_conversation(200),
)
