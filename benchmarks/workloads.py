"""Conversations as agents hold them, made whole before any clock runs.

Each turn samples 250 tokens (words and a tool call) and observes 400 (the result, and the four tokens that
open the next reply). Every call carries its history as fresh objects, as if parsed from its own request.
All token ids differ, so "which sampled tokens were trained" is a question about sets.
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
from branchline import Generation, Message, Request, Session, read_message, read_messages
from branchline.chat.base import MessageTokens
from branchline.core.token_arrays import Floats, Ids, Origin, as_ids
from branchline.tree.session import CommitResult

Raw = dict[str, Any]

SAMPLED_TOKENS, OBSERVED_TOKENS, GENERATION_PROMPT_TOKENS = 250, 400, 4
_SYSTEM_TOKENS, _TASK_TOKENS = 700, 300


@dataclass(frozen=True)
class Step:
    """One call: the request in each side's form, and the output the engine gives."""

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
    """An episode, call by call."""

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
    """Drives a session through every call; `from_raw` reads the messages as part of it."""
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
    """One agent's conversation so far, as wire messages and as ids."""

    raw: list[Raw]
    ids: list[int]


class _WorkloadBuilder:
    def __init__(self, name: str) -> None:
        self.workload = Workload(name)
        self._rng = Random(7)
        self._next_id = GENERATION_PROMPT_TOKENS
        self._calls = 0

    def start_conversation(self, system: str, task: str) -> _Conversation:
        talk = _Conversation([], [])
        self._append_message(
            talk, {"role": "system", "content": self._text(system, _SYSTEM_TOKENS)}, _SYSTEM_TOKENS
        )
        self._append_message(talk, {"role": "user", "content": task}, _TASK_TOKENS)
        return talk

    def new_task(self) -> str:
        return self._text("Look into this:", _TASK_TOKENS)

    def add_turn(self, talk: _Conversation, *, candidates: int = 1, spawn: str | None = None) -> None:
        """One call for each candidate; the last one is continued."""
        asked, prompt_ids = talk.raw, [*talk.ids, *range(GENERATION_PROMPT_TOKENS)]
        for _ in range(candidates):
            said = self._reply(spawn)
            step = self._step(asked, prompt_ids, said)
            self.workload.steps.append(step)
        talk.raw = [*asked, said]
        talk.ids = [*prompt_ids, *step.id_list]
        result: Raw = {
            "role": "tool",
            "content": self._text("It says:", OBSERVED_TOKENS),
            "tool_call_id": said["tool_calls"][0]["id"],
        }
        self._append_message(talk, result, OBSERVED_TOKENS - GENERATION_PROMPT_TOKENS)

    def _append_message(self, talk: _Conversation, raw: Raw, count: int) -> None:
        ids = self._ids(count)
        talk.raw = [*talk.raw, raw]
        talk.ids = [*talk.ids, *ids.tolist()]
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

    def _step(self, asked: list[Raw], prompt_ids: list[int], said: Raw) -> Step:
        ids = self._ids(SAMPLED_TOKENS)
        logprobs = -np.random.default_rng(self._calls).random(SAMPLED_TOKENS, np.float32)
        raw, raw_output = _json_copy(asked), _json_copy(said)
        return Step(
            raw,
            read_messages(raw),
            prompt_ids,
            raw_output,
            # As a gateway records it: clients do not send the response's id back.
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
        """Text of about as many tokens, at four letters each."""
        return f"{start} " + " ".join(f"{self._rng.randrange(1000):03d}" for _ in range(tokens))


def _json_copy(value: Any) -> Any:
    return msgspec.json.decode(msgspec.json.encode(value))


def long_conversation(turns: int) -> Workload:
    maker = _WorkloadBuilder(f"{turns} turns")
    talk = maker.start_conversation("You are an agent.", maker.new_task())
    for _ in range(turns):
        maker.add_turn(talk)
    return maker.workload


def with_sub_agents(turns: int = 60, sub_agents: int = 3, sub_turns: int = 15) -> Workload:
    maker = _WorkloadBuilder(f"{turns} turns + {sub_agents} sub-agents")
    talk = maker.start_conversation("You are an agent.", maker.new_task())
    for turn in range(turns):
        spawns = turn % (turns // (sub_agents + 1)) == 1 and turn > sub_agents
        task = maker.new_task() if spawns else None
        maker.add_turn(talk, spawn=task)
        if task is not None:
            helper = maker.start_conversation(f"You are helper {turn}.", task)
            for _ in range(sub_turns):
                maker.add_turn(helper)
    return maker.workload


def best_of(candidates: int = 4, turns: int = 30) -> Workload:
    maker = _WorkloadBuilder(f"best of {candidates} × {turns}")
    talk = maker.start_conversation("You are an agent.", maker.new_task())
    for _ in range(turns):
        maker.add_turn(talk, candidates=candidates)
    return maker.workload


ALL_WORKLOADS: tuple[Callable[[], Workload], ...] = (
    lambda: long_conversation(60),
    with_sub_agents,
    best_of,
    lambda: long_conversation(200),
)
