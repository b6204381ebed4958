"""How a field of a config dataclass is an option: what its type, default and docstring do not say.

    @dataclass(frozen=True)
    class ServeOptions:
        port: int = option(8100, basic=True)
        \"""The port to listen on.\"""
        gateway: GatewayConfig = group(GatewayConfig, "gateway")

A field without any of this is an option, too; `cli/options` makes them arguments, keys and variables.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any

_KEY = "branchline.option"


@dataclasses.dataclass(frozen=True)
class OptionField:
    """What a field is as an option."""

    name: str = ""
    """Its name; empty: that of the field."""
    basic: bool = False
    """Whether `--help` shows it; `--help-all` shows all."""
    positional: bool = False
    metavar: str = ""
    needs: Mapping[str, Collection[object]] = dataclasses.field(default_factory=dict)
    """Options without which it has no effect, with the values that they need; none: any but its default."""
    variable: bool = True
    secret: bool = False
    """Whether its value is never printed or kept."""
    is_option: bool = True


@dataclasses.dataclass(frozen=True)
class GroupField:
    """How the fields of a nested dataclass are options of the command."""

    title: str
    only: Collection[str] = ()
    """The fields that are options; none: all."""
    without: Collection[str] = ()


def option(
    default: Any = dataclasses.MISSING,
    *,
    factory: Any = dataclasses.MISSING,
    name: str = "",
    basic: bool = False,
    positional: bool = False,
    metavar: str = "",
    needs: Mapping[str, Collection[object]] | None = None,
    variable: bool = True,
    secret: bool = False,
) -> Any:
    """A field that is an option; without a default it is required."""
    about = OptionField(name, basic, positional, metavar, needs or {}, variable, secret)
    return dataclasses.field(
        default=default, default_factory=factory, metadata={_KEY: about}, repr=not secret
    )


def not_an_option(default: Any = dataclasses.MISSING, *, factory: Any = dataclasses.MISSING) -> Any:
    """A field that only a program sets."""
    about = OptionField(is_option=False)
    return dataclasses.field(default=default, default_factory=factory, metadata={_KEY: about})


def group(
    factory: Callable[[], Any], title: str, *, only: Collection[str] = (), without: Collection[str] = ()
) -> Any:
    """A nested dataclass whose fields are options of the command, beside its own. `factory` makes the one
    with the defaults."""
    return dataclasses.field(default_factory=factory, metadata={_KEY: GroupField(title, only, without)})


def about_field(field: dataclasses.Field[Any]) -> OptionField | GroupField:
    """Returns what a field says of itself as an option."""
    about = field.metadata.get(_KEY)
    return about if isinstance(about, OptionField | GroupField) else OptionField()
