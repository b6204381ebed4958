"""Runs a plan on a session, call by call, and records the ids that went in and out.

`causal_order` draws a causally possible order; with `overlap`, independent calls are prepared before others
commit, as concurrent calls are.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from random import Random
from typing import Protocol

import numpy as np

from branchline.chat.base import Tools
from branchline.core.call import Call, Delivery, Generation, Request
from branchline.core.errors import TemplateError
from branchline.core.message import Message, ToolCall
from branchline.core.token_arrays import Floats, Ids
from branchline.testing.plans import PlannedCall, PlannedOutput
from branchline.timelines.log import LoggedCall, LoggedOutput
from branchline.tree.session import Session
from branchline.tree.tree import Turn


@dataclass(frozen=True)
class ExecutedCall:
    """One call as it was executed: the prompt that the engine got and its outputs."""

    planned: PlannedCall
    call: Call
    prompt_ids: Ids
    outputs: tuple[Ids, ...]
    logprobs: tuple[Floats, ...]


class ReplyEncoder(Protocol):
    """Encodes messages as a model would sample them."""

    def encode_reply(self, message: Message, *, stop: bool = True) -> Ids:
        """Returns the ids that a model would sample for a message; without `stop` they have no stop token."""
        ...


class PlanRunner:
    """Runs plans on one session. A call that the template rejects is skipped, with all calls that depend on
    it."""

    def __init__(self, session: Session, encoder: ReplyEncoder) -> None:
        self.session = session
        self.encoder = encoder
        self.executed: list[ExecutedCall] = []
        self.rejected: set[int] = set()
        self.rejections: list[str] = []
        """The template's own messages, one for each call that it refused."""
        self._prepared: dict[int, Turn] = {}

    def run(
        self, plan: Sequence[PlannedCall], order: Sequence[int] | None = None, overlap: Random | None = None
    ) -> None:
        """Runs all calls of a plan in the given order; with `overlap`, some are prepared early."""
        done: set[int] = set()
        for index in order if order is not None else range(len(plan)):
            if overlap is not None:
                for other in plan:
                    ready = (
                        other.depends_on <= done
                        and other.index not in done
                        and other.index not in self._prepared
                    )
                    if ready and not other.depends_on & self.rejected and overlap.random() < 0.5:
                        with suppress(TemplateError):
                            self.prepare(other)
            if not plan[index].depends_on & self.rejected:
                try:
                    self.commit(plan[index])
                except TemplateError as error:
                    self.rejected.add(index)
                    self.rejections.append(str(error))
            else:
                self.rejected.add(index)
            done.add(index)

    def prepare(self, planned: PlannedCall) -> Turn:
        request = Request(planned.messages, planned.tools, agent=planned.agent, retry_count=planned.retry)
        turn = self.session.prepare(request)
        self._prepared[planned.index] = turn
        return turn

    def commit(self, planned: PlannedCall) -> ExecutedCall:
        turn = self._prepared.pop(planned.index, None) or self.prepare(planned)
        self._prepared.pop(planned.index, None)
        outputs = tuple(
            self.encoder.encode_reply(output.message, stop=output.is_complete) for output in planned.outputs
        )
        logprobs = tuple(np.linspace(-1, 0, len(ids), dtype=np.float32) for ids in outputs)
        generations = [
            Generation(
                ids,
                values,
                planned.index,
                "stop" if output.is_complete else "length",
                self._parse(ids, output, planned.tools),
            )
            for ids, values, output in zip(outputs, logprobs, planned.outputs, strict=True)
        ]
        call = self.session.commit(turn, *generations).call
        if planned.delivery != Delivery.PENDING:
            self.session.record_delivery(call, planned.delivery)
        executed = ExecutedCall(planned, call, turn.prompt_ids, outputs, logprobs)
        self.executed.append(executed)
        return executed

    def _parse(self, ids: Ids, output: PlannedOutput, tools: Tools) -> Message:
        """Returns the parsed message, which must equal the planned one; calls without an id get the planned
        id."""
        parsed, expected = self.session.codec.parse(ids, tools=tools), output.message
        assert parsed.key == expected.key, f"{expected} parses as {parsed}"
        calls = tuple(
            ToolCall(call.name, call.arguments, call.id or planned.id)
            for call, planned in zip(parsed.tool_calls, expected.tool_calls, strict=True)
        )
        return Message(
            "assistant", parsed.content, reasoning_content=parsed.reasoning_content, tool_calls=calls
        )

    def to_log(self) -> list[LoggedCall]:
        """Returns the executed calls as a foreign log."""
        return [
            LoggedCall(
                Request(call.planned.messages, call.planned.tools, agent=call.planned.agent),
                tuple(
                    LoggedOutput(output.message, ids, logprobs, "stop" if output.is_complete else "length")
                    for output, ids, logprobs in zip(
                        call.planned.outputs, call.outputs, call.logprobs, strict=True
                    )
                ),
                call.prompt_ids,
                line=line,
            )
            for line, call in enumerate(self.executed, start=1)
        ]


def causal_order(plan: Sequence[PlannedCall], rng: Random) -> list[int]:
    """Returns a random order in which every call follows the calls it depends on."""
    order: list[int] = []
    done: set[int] = set()
    remaining = {call.index for call in plan}
    while remaining:
        ready = sorted(index for index in remaining if plan[index].depends_on <= done)
        order.append(rng.choice(ready))
        done.add(order[-1])
        remaining.remove(order[-1])
    return order
