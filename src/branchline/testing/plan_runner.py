"""Plays a plan against a session, call by call, and keeps what really went in and out.

`orders` gives causally possible orders; `overlap` lets calls that do not need each other run side by
side, prepared before the others commit.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from random import Random
from typing import Protocol

import numpy as np

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
    """One call as it happened: the prompt the engine got and the outputs it gave."""

    planned: PlannedCall
    call: Call
    prompt_ids: Ids
    outputs: tuple[Ids, ...]
    logprobs: tuple[Floats, ...]


class ReplyEncoder(Protocol):
    """Says messages as a model would."""

    def encode_reply(self, message: Message, *, stop: bool = True) -> Ids:
        """The ids a model would sample to say this; without a stop it was cut."""
        ...


class PlanRunner:
    """Runs plans on one session. A call that the template refuses is left out, and what needs it too."""

    def __init__(self, session: Session, encoder: ReplyEncoder) -> None:
        self.session = session
        self.encoder = encoder
        self.executed: list[ExecutedCall] = []
        self.refused: set[int] = set()
        self._prepared: dict[int, Turn] = {}

    def run(
        self, plan: Sequence[PlannedCall], order: Sequence[int] | None = None, overlap: Random | None = None
    ) -> None:
        """Plays all calls of a plan in an order; with `overlap`, some are prepared before they commit."""
        done: set[int] = set()
        for index in order if order is not None else range(len(plan)):
            if overlap is not None:
                for other in plan:
                    ready = (
                        other.depends_on <= done
                        and other.index not in done
                        and other.index not in self._prepared
                    )
                    if ready and not other.depends_on & self.refused and overlap.random() < 0.5:
                        with suppress(TemplateError):
                            self.prepare(other)
            if not plan[index].depends_on & self.refused:
                try:
                    self.commit(plan[index])
                except TemplateError:
                    self.refused.add(index)
            else:
                self.refused.add(index)
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
                given,
                planned.index,
                "stop" if output.is_complete else "length",
                self._parse(ids, output),
            )
            for ids, given, output in zip(outputs, logprobs, planned.outputs, strict=True)
        ]
        call = self.session.commit(turn, *generations).call
        if planned.delivery != Delivery.PENDING:
            self.session.record_delivery(call, planned.delivery)
        played = ExecutedCall(planned, call, turn.prompt_ids, outputs, logprobs)
        self.executed.append(played)
        return played

    def _parse(self, ids: Ids, output: PlannedOutput) -> Message:
        """The message as parsed; it must be what was meant; calls without an id get one."""
        parsed, meant = self.session.codec.parse(ids), output.message
        assert parsed.key == meant.key, f"{meant} parses as {parsed}"
        calls = tuple(
            ToolCall(said.name, said.arguments, said.id or call.id)
            for said, call in zip(parsed.tool_calls, meant.tool_calls, strict=True)
        )
        return Message(
            "assistant", parsed.content, reasoning_content=parsed.reasoning_content, tool_calls=calls
        )

    def to_log(self) -> list[LoggedCall]:
        """The same calls as a foreign log would have them."""
        return [
            LoggedCall(
                Request(one.planned.messages, one.planned.tools, agent=one.planned.agent),
                tuple(
                    LoggedOutput(output.message, ids, given, "stop" if output.is_complete else "length")
                    for output, ids, given in zip(one.planned.outputs, one.outputs, one.logprobs, strict=True)
                ),
                one.prompt_ids,
                line=line,
            )
            for line, one in enumerate(self.executed, start=1)
        ]


def causal_order(plan: Sequence[PlannedCall], rng: Random) -> list[int]:
    """A random order in which every call comes after those it needs."""
    order: list[int] = []
    done: set[int] = set()
    left = {call.index for call in plan}
    while left:
        ready = sorted(index for index in left if plan[index].depends_on <= done)
        order.append(rng.choice(ready))
        done.add(order[-1])
        left.remove(order[-1])
    return order
