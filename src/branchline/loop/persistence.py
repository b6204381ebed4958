"""The state of tools and interactions across a cancelled and resumed trajectory.

When a trajectory is interrupted, `save` returns an instance as JSON data, which is stored in the LoopState;
`restore` makes an instance from it when the trajectory continues, in this process or in another:

    class Calculator(BaseTool):
        def save(self, instance): return instance.results
        async def restore(self, trajectory, saved, **arguments): return Slate(results=saved, **arguments)

If nothing was saved, a new instance is created with the arguments of the task. If the old one had state
and was used, this is recorded as a fault, because results and rewards may differ from an uninterrupted run.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any, Literal, Protocol

import msgspec

from branchline.core.errors import InputError
from branchline.core.reader import replace_surrogates_deep
from branchline.loop.timeouts import describe_error

log = logging.getLogger("branchline.loop")

FaultOperation = Literal[
    "calc_reward",
    "release",
    "finalize",
    "save",
    "recreated",
    "repeated",
    "unavailable",
    "start",
    "respond",
    "score",
    "compact",
]
_REWARD_FAILURES = ("calc_reward", "unavailable", "start", "respond", "score", "compact")


class Fault(msgspec.Struct, frozen=True):
    """A failure outside the conversation; state and output list it. A tool that is `unavailable`, an
    interaction that cannot `start` or `respond` and a policy that cannot `compact` end the trajectory, others
    do not.

    >>> str(Fault("search", "calc_reward", "no index"))
    'search: calc_reward: no index'
    """

    name: str
    """The tool, the interaction or the compaction policy."""
    operation: FaultOperation
    """`recreated`: a used instance was replaced by a new one without its state. `repeated`: a call that was
    cancelled while it ran was run again, and its effect may count twice."""
    error: str

    @property
    def is_reward_failure(self) -> bool:
        """Whether a reward is missing because of it."""
        return self.operation in _REWARD_FAILURES

    def __str__(self) -> str:
        return f"{self.name}: {self.operation}: {self.error}"


class Restorable(Protocol):
    """What tools and interactions have in common: a name, and instances that may outlive a process."""

    @property
    def name(self) -> str: ...

    @property
    def is_stateful(self) -> bool:
        """Whether a used instance can differ from a new one with the same arguments."""

    def save(self, instance: Any, /) -> Any:
        """The instance as data that JSON can hold, without waiting; None to save nothing."""

    async def restore(self, trajectory: str, saved: Any, **arguments: Any) -> Any:
        """An instance from what `save` returned; the arguments are those of the task."""


def save_state(owner: Restorable, instance: Any, saved: dict[str, Any]) -> Fault | None:
    """Stores what `save` returns under the owner's name; returns a fault if that fails."""
    name = owner.name
    saved.pop(name, None)
    try:
        value = owner.save(instance)
        if value is not None:
            saved[name] = to_plain_data(value, "saved")
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        # The trajectory can still be resumed; this instance is then created again.
        log.exception("%s: its state could not be saved", name)
        return Fault(name, "save", describe_error(error))
    return None


def lost_state(owner: Restorable, saved: Mapping[str, Any], trajectory: str) -> Fault | None:
    """The fault of an owner whose used instance is created again without its state, if it had any."""
    if owner.name in saved or not owner.is_stateful:
        return None
    fault = Fault(owner.name, "recreated", "it was used before and its state was not saved")
    log.warning("%s: %s", trajectory, fault)
    return fault


# -- data from foreign code --------------------------------------------------------------------------


def to_plain_data(value: Any, name: str) -> Any:
    """A copy that JSON can hold: numpy and torch numbers, sets, dates and dataclasses become plain values.

    >>> to_plain_data({"seen": {3}, 1: (0.5, None)}, "extras")
    {'seen': [3], '1': [0.5, None]}
    """
    try:
        data = replace_surrogates_deep(msgspec.to_builtins(value, str_keys=True, enc_hook=encode_hook))
        # Refuses numbers that do not fit any encoding.
        msgspec.msgpack.encode(data)
    except (InputError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InputError(f"{name}: {error}, expected values that JSON can hold") from error
    return data


def encode_hook(value: object) -> object:
    """msgspec's enc_hook for mappings and for arrays and numbers of numpy and torch."""
    if isinstance(value, Mapping):
        return dict(value)
    to_list = getattr(value, "tolist", None)
    if to_list is None:
        raise InputError(f"got a {type(value).__name__}")
    return to_list()


def copy_containers(value: Any) -> Any:
    """A copy of dicts, lists, tuples and sets at any depth; all other values are shared.

    Samples of one task start with the same arguments, and a trajectory may change its own. A value that is no
    data, such as a connection, is meant to be shared.
    """
    if isinstance(value, Mapping):
        return {key: copy_containers(item) for key, item in value.items()}
    if type(value) in (list, tuple, set):
        return type(value)([copy_containers(item) for item in value])
    return value


def check_finite(value: Any, name: str) -> float | None:
    """The value as a float, or None. Raises an error if it is a text, infinite or NaN."""
    if value is None:
        return None
    if isinstance(value, str | bytes | bytearray):
        raise TypeError(f"{name}: got {value!r}, expected a number")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{name}: got {value}, expected a finite number")
    return number
