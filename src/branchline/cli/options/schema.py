"""The options of a command: the fields of its dataclass, those of nested dataclasses among them."""

from __future__ import annotations

import ast
import dataclasses
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from branchline.cli.options.values import ValueType
from branchline.core.errors import BranchlineError
from branchline.core.option_fields import GroupField, OptionField, about_field

VARIABLE_PREFIX = "BRANCHLINE_"
CONFIG_OPTIONS = ("config", "print_config", "help", "help_all")
"""Names of the options that every command has."""


@dataclass(frozen=True)
class Option:
    """One option of a command."""

    name: str
    """With underscores: its key in a file."""
    owner: type
    """The dataclass that has the field."""
    field: dataclasses.Field[Any]
    about: OptionField
    path: tuple[str, ...]
    """The names of the nested dataclasses that lead to it."""
    title: str
    """The heading of its group."""
    default: object
    """dataclasses.MISSING: it is required."""

    @cached_property
    def type(self) -> ValueType:
        return ValueType(_resolve(self.owner, self.field))

    @property
    def is_required(self) -> bool:
        return self.default is dataclasses.MISSING

    @property
    def flag(self) -> str:
        """As a user writes it: the name of a positional argument, else the option. A switch that is on by
        default is written as what turns it off."""
        if self.about.positional:
            return self.metavar
        off = "no-" if self.type.is_switch and self.default is True else ""
        return f"--{off}{self.name.replace('_', '-')}"

    @property
    def variable(self) -> str:
        return VARIABLE_PREFIX + self.name.upper()

    @property
    def metavar(self) -> str:
        return self.about.metavar or self.type.metavar

    @property
    def help(self) -> str:
        """The docstring of the field, on one line."""
        return " ".join(_field_docs(self.owner).get(self.field.name, "").split())


class OptionSchema:
    """The options of a dataclass, by name."""

    def __init__(self, options_class: type) -> None:
        self.options_class = options_class
        self.options: dict[str, Option] = {}
        self.groups: dict[str, type] = {}
        """The nested dataclasses by their keys."""
        for option in self._read(options_class, None, GroupField("options"), ()):
            if option.name in self.options or option.name in CONFIG_OPTIONS:
                raise TypeError(f"{options_class.__name__}: two options are named {option.name}")
            self.options[option.name] = option
        if shared := self.groups.keys() & self.options.keys():
            raise TypeError(f"{options_class.__name__}: {sorted(shared)} name a group and an option")

    @property
    def positional(self) -> Option | None:
        return next((option for option in self.options.values() if option.about.positional), None)

    def _read(
        self, owner: type, defaults: object, group: GroupField, path: tuple[str, ...]
    ) -> Iterator[Option]:
        for field in dataclasses.fields(owner):
            about = about_field(field)
            if isinstance(about, GroupField):
                nested, nested_defaults = _nested(field, defaults)
                self.groups[field.name] = nested
                yield from self._read(nested, nested_defaults, about, (*path, field.name))
                continue
            is_left_out = field.name in group.without or (group.only and field.name not in group.only)
            if about.is_option and not is_left_out:
                default = _default(field) if defaults is None else getattr(defaults, field.name)
                name = about.name or field.name
                yield Option(name, owner, field, about, path, group.title, default)


def build(
    schema: OptionSchema,
    values: dict[str, object],
    on_error: Callable[[Option | None, BranchlineError], Exception],
) -> Any:
    """Returns the dataclass with these values, by option; the defaults otherwise. `on_error` makes an error
    of what a dataclass raises, and of the option that its message begins with."""

    def make(owner: type, defaults: object, path: tuple[str, ...]) -> Any:
        given: dict[str, Any] = {}
        by_field: dict[str, Option] = {}
        for option in schema.options.values():
            if option.path == path:
                by_field[option.field.name] = option
                if option.name in values:
                    given[option.field.name] = values[option.name]
        for field in dataclasses.fields(owner):
            if isinstance(about_field(field), GroupField):
                given[field.name] = make(*_nested(field, defaults), (*path, field.name))
        try:
            return owner(**given) if defaults is None else dataclasses.replace(defaults, **given)  # type: ignore[type-var]
        except BranchlineError as error:
            name = str(error).partition(":")[0]
            raise on_error(by_field.get(name), error) from error

    return make(schema.options_class, None, ())


def _nested(field: dataclasses.Field[Any], defaults: object) -> tuple[type, object]:
    """The dataclass of a group, and its defaults: None, if they are those of its fields. Then none is made:
    one could need packages that only the command itself needs."""
    factory: Any = field.default_factory
    if defaults is None and isinstance(factory, type):
        return factory, None
    made = factory() if defaults is None else getattr(defaults, field.name)
    return type(made), made


def _default(field: dataclasses.Field[Any]) -> object:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _resolve(owner: type, field: dataclasses.Field[Any]) -> Any:
    """The annotation of a field as a type. Each alone: others may name what only type checkers import."""
    if not isinstance(field.type, str):
        return field.type
    for cls in owner.__mro__:
        if field.name in vars(cls).get("__annotations__", {}):
            owner = cls
            break
    return eval(field.type, vars(sys.modules[owner.__module__]))


@cache
def _field_docs(owner: type) -> dict[str, str]:
    """The docstrings of a class's fields. They are read from its source: nothing else keeps them."""
    docs: dict[str, str] = {}
    for cls in reversed(owner.__mro__):
        file = getattr(sys.modules.get(cls.__module__), "__file__", None)
        if dataclasses.is_dataclass(cls) and file is not None and Path(file).is_file():
            docs |= _class_docs(Path(file)).get(cls.__qualname__, {})
    return docs


@cache
def _class_docs(file: Path) -> dict[str, dict[str, str]]:
    """The docstrings of the fields of each class in a file."""
    found: dict[str, dict[str, str]] = {}
    for node in ast.parse(file.read_bytes()).body:
        if isinstance(node, ast.ClassDef):
            found[node.name] = {
                field.target.id: after.value.value
                for field, after in zip(node.body, node.body[1:], strict=False)
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
                if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
                if isinstance(after.value.value, str)
            }
    return found
