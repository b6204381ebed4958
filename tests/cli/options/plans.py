"""A command with an option of every type, for the tests of what reads options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from branchline.cli.options.command import Command
from branchline.cli.options.parser import read_options
from branchline.core.errors import InputError
from branchline.core.option_fields import group, not_an_option, option


@dataclass(frozen=True)
class Limits:
    """A nested group."""

    max_calls: int = 10
    """Calls of a session. More than that are refused."""
    rate: float = 0.5
    """Calls in a second."""
    clock: object = not_an_option(None)

    def __post_init__(self) -> None:
        if self.max_calls < 1:
            raise InputError(f"max_calls: got {self.max_calls}, expected 1 or more")


@dataclass(frozen=True)
class Plan:
    """An option of every type."""

    source: str = option(positional=True, metavar="SOURCE")
    """Where it is from."""
    text: str = option("plain", basic=True)
    """A text. There is more to say about it."""
    name: str | None = None
    """A text or nothing."""
    count: int = 3
    """A number."""
    ratio: float | None = None
    """A number or nothing."""
    is_on: bool = False
    """A switch."""
    auth: bool = True
    """A switch that is on."""
    folder: Path | None = None
    """A path."""
    kind: Literal["small", "large"] = "small"
    """A choice."""
    tags: tuple[str, ...] = ()
    """Several texts."""
    ports: tuple[int, ...] = option((), name="port")
    """Several numbers."""
    colours: tuple[Literal["red", "blue"], ...] = ()
    """Several choices."""
    counts: Mapping[str, int] = option(factory=dict, name="retry")
    """Numbers by name."""
    settings: dict[str, Any] = option(factory=dict)
    """An object."""
    key: str = option("", secret=True)
    """A secret."""
    detail: str = option("", needs={"is_on": (), "kind": ("large",)})
    """Something for a large plan that is on."""
    hidden: str | None = option(None, variable=False)
    """Has no variable."""
    limits: Limits = group(Limits, "limits")


COMMAND = Command("plan", Plan, "tests:none", "Plans.", details="Details.", renamed={"label": "text"})


def read(*arguments: str, source: str | None = "s", **variables: str) -> Plan:
    """The options of a command line and variables, whose names are given without the prefix."""
    plan = read_options(COMMAND, [*arguments, *([source] if source else [])], environ(variables)).options
    assert isinstance(plan, Plan)
    return plan


def printed(arguments: Sequence[str], **variables: str) -> str:
    text = read_options(COMMAND, arguments, environ(variables)).text
    assert text is not None
    return text


def environ(variables: Mapping[str, str]) -> dict[str, str]:
    return {f"BRANCHLINE_{name.upper()}": value for name, value in variables.items()}
