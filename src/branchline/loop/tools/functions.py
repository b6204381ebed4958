"""Plain Python functions as tools: `@tool` makes the schema from annotations and docstring.

    @tool
    def search(query: str, limit: int = 3) -> list[str]:
        \"\"\"Finds pages.

        Args:
            query: What to look for.
            limit: How many pages at most.
        \"\"\"

What the model sends arrives as what the annotations say: enums, dates, dataclasses and structs included.
Synchronous functions run in a thread. A thread cannot be cancelled: a call that takes too long is answered
with a timeout all the same, but the function goes on until it returns by itself.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_type_hints, overload

import msgspec
from msgspec import UNSET, UnsetType

from branchline.core.arguments import canonical_json
from branchline.core.errors import InputError
from branchline.loop.tools.base import BaseTool, ToolResult, function_schema
from branchline.loop.tools.results import result_of
from branchline.loop.waiting import in_thread

Function = Callable[..., Any]


@overload
def tool(function: Function, /) -> FunctionTool: ...
@overload
def tool(
    *, name: str = "", description: str = "", per_sample: Sequence[str] = ()
) -> Callable[[Function], FunctionTool]: ...
def tool(
    function: Function | None = None,
    /,
    *,
    name: str = "",
    description: str = "",
    per_sample: Sequence[str] = (),
) -> FunctionTool | Callable[[Function], FunctionTool]:
    """Makes a function a tool; name and description are its own unless given.

    `per_sample` names parameters that the model does not see: they come from the sample's `tool_arguments`.
    """
    if function is not None:
        return FunctionTool(function)
    return lambda function: FunctionTool(function, name, description, per_sample)


class FunctionTool(BaseTool):
    """A function and its schema; still callable as the function it was."""

    def __init__(
        self, function: Function, name: str = "", description: str = "", per_sample: Sequence[str] = ()
    ) -> None:
        self.function = function
        self.name = name or function.__name__
        parameters = _parameters(function, self.name)
        for given in per_sample:
            if given not in parameters:
                raise InputError(
                    f"per_sample of tool {self.name!r}: got {given!r}, expected one of {list(parameters)}"
                )
        self._per_sample = {given: parameters[given] for given in per_sample}
        hints = _hints(function, self.name)
        about, described = _read_docstring(inspect.getdoc(function) or "")
        for documented in described:
            if documented not in parameters:
                raise InputError(
                    f"docstring of tool {self.name!r}: Args describes {documented!r}, "
                    f"expected one of {list(parameters)}"
                )
        shown = [each for each in parameters.values() if each.name not in self._per_sample]
        self._model = _model(self.name, shown, hints)
        self.schema: Mapping[str, Any] = function_schema(
            self.name, description or about, _schema(self.name, self._model, shown, described)
        )

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self.function(*args, **named)

    async def create(self, trajectory: str, **arguments: Any) -> Any:
        expected = list(self._per_sample)
        for name in arguments:
            if name not in self._per_sample:
                raise InputError(f"tool_arguments: got {name!r}, expected only {expected}")
        for name, parameter in self._per_sample.items():
            if name not in arguments and parameter.default is parameter.empty:
                raise InputError(f"tool_arguments: {name!r} is missing, expected all of {expected}")
        return arguments

    async def execute(self, instance: Any, arguments: Mapping[str, Any]) -> ToolResult:
        model = msgspec.convert(arguments, self._model)
        given = {
            name: value for name in model.__struct_fields__ if (value := getattr(model, name)) is not UNSET
        }
        if inspect.iscoroutinefunction(self.function):
            value = await self.function(**given, **instance)
        else:
            value = await in_thread(self.function, **given, **instance)
            if inspect.isawaitable(value):
                # A wrapper around a coroutine function looks like a plain one.
                value = await value
        return result_of(value)


# -- the schema --------------------------------------------------------------------------------------


def _parameters(function: Function, name: str) -> dict[str, inspect.Parameter]:
    parameters = dict(inspect.signature(function).parameters)
    for parameter in parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise InputError(
                f"tool {name!r}: got parameter {str(parameter)!r}, expected one with a name of its own"
            )
        if parameter.annotation is parameter.empty:
            raise InputError(
                f"tool {name!r}: parameter {parameter.name!r} has no annotation, expected one: "
                "the model is told what to send"
            )
    return parameters


def _hints(function: Function, name: str) -> dict[str, Any]:
    try:
        return get_type_hints(function, include_extras=True)
    except Exception as error:
        raise InputError(
            f"annotations of tool {name!r}: expected types that can be found, but {error}"
        ) from error


def _model(
    name: str, parameters: Sequence[inspect.Parameter], hints: Mapping[str, Any]
) -> type[msgspec.Struct]:
    """A struct of the arguments. An argument left out is left to the function's own default."""
    fields: list[Any] = []
    for parameter in parameters:
        kind = hints[parameter.name]
        if parameter.default is parameter.empty:
            fields.append((parameter.name, kind))
        else:
            fields.append((parameter.name, kind | UnsetType if kind is not Any else Any, UNSET))
    return msgspec.defstruct(name, fields, kw_only=True, forbid_unknown_fields=True)


def _schema(
    name: str,
    model: type[msgspec.Struct],
    parameters: Sequence[inspect.Parameter],
    described: Mapping[str, str],
) -> dict[str, Any]:
    try:
        whole = msgspec.json.schema(model)
    except TypeError as error:
        raise InputError(
            f"annotations of tool {name!r}: expected types that JSON can carry, but {error}"
        ) from error
    definitions = dict(whole["$defs"])
    schema = dict(definitions.pop(whole["$ref"].rpartition("/")[2]))
    schema.pop("title")
    for parameter in parameters:
        field = schema["properties"][parameter.name]
        if parameter.name in described:
            field["description"] = described[parameter.name]
        if parameter.default is not parameter.empty:
            try:
                field["default"] = json.loads(canonical_json(msgspec.to_builtins(parameter.default)))
            except (TypeError, ValueError):
                # A default that only Python can spell is not the model's business.
                continue
    return {**schema, "$defs": definitions} if definitions else schema


# -- the docstring -----------------------------------------------------------------------------------

_SECTION = re.compile(
    r"^(Args|Arguments|Parameters|Returns|Yields|Raises|Examples?|Notes?|Attributes|See Also):\s*$"
)
_ARGUMENTS = ("Args", "Arguments", "Parameters")
_ARGUMENT = re.compile(r"^\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)$")


def _read_docstring(doc: str) -> tuple[str, dict[str, str]]:
    """What stands before the first section, and what Args says of each parameter."""
    about: list[str] = []
    described: dict[str, list[str]] = {}
    section, indent = "", -1
    current: list[str] | None = None
    for line in doc.splitlines():
        heading = _SECTION.match(line)
        if heading is not None:
            section, indent, current = heading[1], -1, None
        elif not section:
            about.append(line)
        elif section in _ARGUMENTS and line.strip():
            depth = len(line) - len(line.lstrip())
            indent = depth if indent < 0 else indent
            argument = _ARGUMENT.match(line.strip()) if depth <= indent else None
            if argument is not None:
                current = described[argument[1]] = [argument[2]]
            elif current is not None:
                current.append(line.strip())
    texts = {name: " ".join(lines).strip() for name, lines in described.items()}
    return "\n".join(about).strip(), texts
