"""Records the calls of tools and interactions for observers, such as traces."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

from branchline.runtime.call_record import StepObserver, StepRecord


class StepRecorder:
    """Passes a StepRecord to each observer when a call of a tool or an interaction is over."""

    def __init__(self, observers: Sequence[StepObserver] = ()) -> None:
        self.observers = observers
        self.session_id = ""
        self.session_created_at = 0.0

    @contextmanager
    def record(
        self, kind: Literal["tool", "interaction"], name: str, operation: str, tool_call_id: str = ""
    ) -> Iterator[None]:
        """Records the block; an exception that leaves it is the step's error."""
        if not self.observers:
            yield
            return
        started_at, started, error_type = time.time(), time.perf_counter(), ""
        try:
            yield
        except asyncio.CancelledError:
            error_type = "cancelled"
            raise
        except BaseException as error:
            error_type = type(error).__name__
            raise
        finally:
            record = StepRecord(
                self.session_id,
                self.session_created_at,
                kind,
                name,
                operation,
                started_at,
                time.perf_counter() - started,
                tool_call_id,
                error_type,
            )
            for observe in self.observers:
                observe(record)
