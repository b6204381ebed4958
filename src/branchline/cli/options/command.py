"""What a command of `branchline` is. Its options and texts need no other part of the library."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Command:
    """A command: its options, its texts, and where the function is that executes it."""

    name: str
    """As typed after `branchline`."""
    options: type
    """The dataclass of its options."""
    run: str
    """`module:function` of the options; it is imported when the command runs."""
    description: str
    examples: str = ""
    details: str = ""
    """What only `--help-all` shows."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Options of older versions, with their names of today."""

    def execute(self, options: Any) -> str | tuple[str, int]:
        """Runs the command; returns what it prints, and its exit code if it is not 0."""
        module, _, name = self.run.partition(":")
        output: str | tuple[str, int] = getattr(importlib.import_module(module), name)(options)
        return output


@dataclass(frozen=True)
class CommandGroup:
    """A command with actions, each a command of its own: `branchline journal check`."""

    name: str
    description: str
    actions: Mapping[str, tuple[str, Command]]
    """A line about each action, and its command."""
    examples: str = ""
