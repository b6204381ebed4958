"""What a run of the demo is defined by: options of `branchline demo`."""

from __future__ import annotations

from dataclasses import dataclass

from branchline.core.errors import InputError
from branchline.core.option_fields import option

_NEW_RUN = {"resume": (False,)}
"""A resumed run keeps its own."""


@dataclass(frozen=True)
class DemoSettings:
    """What a run of the demo is defined by."""

    seed: int = option(0, basic=True, needs=_NEW_RUN)
    """Seed of tasks and sampling."""
    steps: int = option(60, basic=True, needs=_NEW_RUN)
    """Training steps."""

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise InputError(f"steps: got {self.steps}, expected 1 or more")
