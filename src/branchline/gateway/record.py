"""A call as those who watch see it: what metrics count, logs say and traces show, once it is over."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from branchline.gateway.calls import Asked, Done

Outcome = Literal["ok", "refused", "failed", "cancelled"]
"""`refused`: the client's mistake. `failed`: the engine's or the journal's. `cancelled`: the client left."""
Phase = Literal["prepare", "queue", "generate", "commit"]


@dataclass
class CallRecord:
    """One call, filled in while it goes on."""

    session: str
    protocol: str
    call_id: str
    model: str = ""
    agent: str = ""
    group: str = ""
    engine: str = ""
    streamed: bool = False
    asked: Asked | None = None
    done: Done | None = None
    outcome: Outcome = "ok"
    status: int = 200
    error: str = ""
    began: float = field(default_factory=time.time)
    """Seconds since 1970."""
    started_s: float = field(default_factory=time.perf_counter)
    seconds: dict[Phase, float] = field(default_factory=dict)
    """`queue` is the wait for the first token: the engine's queue, a pause, the prefill."""
    total_s: float = 0.0

    def close_phase(self, phase: Phase) -> None:
        """A phase lasts from the end of the one before it."""
        if phase not in self.seconds:
            spent = time.perf_counter() - self.started_s
            self.seconds[phase] = spent - sum(self.seconds.values())

    def close(self) -> None:
        self.total_s = time.perf_counter() - self.started_s


Observer = Callable[[CallRecord], None]
