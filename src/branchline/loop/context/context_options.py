"""Settings of the agent `state`, which edits its context; options of `branchline run` and `train`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from branchline.core.option_checks import check_count, check_number
from branchline.core.option_fields import not_an_option, option

if TYPE_CHECKING:
    from branchline.runtime.compaction import CompactionPolicy

DEFAULT_PENALTY = -1.0
_WITH_LENGTH = {"model_length": ()}


@dataclass(frozen=True)
class ContextOptions:
    """How the agent `state` treats a context that becomes too long."""

    context_length_penalty: float | None = option(DEFAULT_PENALTY, needs=_WITH_LENGTH)
    """The reward of a trajectory that ends because its prompt leaves no room; null keeps its own reward."""
    response_room: int | None = option(None, needs=_WITH_LENGTH)
    """Tokens that the model's length must leave for an answer; by default those of an answer's own limit
    (`max_new_tokens`), or 1."""
    compaction: CompactionPolicy | None = not_an_option(None)
    """Shortens the context before the trajectory would end; None leaves that to the model."""
    compaction_target: float = option(0.6, needs={"compaction": ()})
    """The part of the model's length to which a compaction reduces the prompt."""

    def __post_init__(self) -> None:
        if self.context_length_penalty is not None:
            check_number("context_length_penalty", self.context_length_penalty)
        if self.response_room is not None:
            check_count("response_room", self.response_room)
        check_number("compaction_target", self.compaction_target, above=0, most=1)
        if self.compaction is not None:
            from branchline.runtime.compaction import check_policy

            check_policy("compaction", self.compaction)
