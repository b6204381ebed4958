"""Interactions by name; a sample names one, and the arguments it starts with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from branchline.core.errors import InputError
from branchline.loop.interactions.base import Interaction
from branchline.loop.registry import Registry


@dataclass(frozen=True)
class InteractionConfig:
    """The interaction of one sample, and the arguments it starts with."""

    interaction: Interaction
    arguments: Mapping[str, Any] = field(default_factory=dict)


class InteractionRegistry(Registry[Interaction]):
    """All interactions there are."""

    kind = "interaction"
    async_methods = ("start", "respond", "score", "finalize")

    def select(self, name: str, arguments: Mapping[str, Any] | None = None) -> InteractionConfig:
        """What a sample asks for."""
        if arguments is not None and not isinstance(arguments, Mapping):
            raise InputError(f"interaction_arguments: got {arguments!r}, expected an object")
        return InteractionConfig(self.get(name, "interaction"), arguments or {})
