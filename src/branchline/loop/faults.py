"""What went wrong where no model is there to be told: who, doing what, in words.

A fault never ends a trajectory. It stands in the state and in the output, so that nobody takes what is left
of a reward for the reward.
"""

from __future__ import annotations

from typing import Literal

import msgspec

FaultOperation = Literal["calc_reward", "release", "finalize", "save", "recreated"]


class Fault(msgspec.Struct, frozen=True):
    """One thing that failed.

    >>> str(Fault("search", "calc_reward", "no index"))
    'search: calc_reward: no index'
    """

    name: str
    """A tool or an interaction, by name."""
    operation: FaultOperation
    """`recreated`: it was used before, and what it remembered then is not there any more."""
    error: str

    @property
    def is_reward_failure(self) -> bool:
        """Whether a reward is missing because of it."""
        return self.operation == "calc_reward"

    def __str__(self) -> str:
        return f"{self.name}: {self.operation}: {self.error}"
