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

import functools
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_type_hints, overload

import msgspec
from msgspec import UNSET, UnsetType

from branchline.core.arguments import canonical_json
from branchline.core.errors import InputError
from branchline.loop.timeouts import run_in_thread
from branchline.loop.tools.annotations import to_msgspec_type, with_null
from branchline.loop.tools.base import BaseTool, ToolResult, function_schema
from branchline.loop.tools.docstrings import read_docstring
from branchline.loop.tools.results import to_tool_result

Function = Callable[..., Any]


@overload
def tool(
    function: Function, /, *, name: str = "", description: str = "", per_sample: Sequence[str] = ()
) -> FunctionTool: ...
@overload
def tool(
    called: str = "", /, *, name: str = "", description: str = "", per_sample: Sequence[str] = ()
) -> Callable[[Function], FunctionTool]: ...
def tool(
    function: Function | str = "",
    /,
    *,
    name: str = "",
    description: str = "",
    per_sample: Sequence[str] = (),
) -> FunctionTool | Callable[[Function], FunctionTool]:
    """Makes a function a tool; name and description are its own unless given.

    `per_sample` names parameters that the model does not see: they come from the sample's `tool_arguments`.
    """
    if not isinstance(function, str):
        return FunctionTool(function, name, description, per_sample)
    # `@tool("search")`, as agents are named.
    called = name or function
    return lambda function: FunctionTool(function, called, description, per_sample)


class FunctionTool(BaseTool):
    """A function and its schema; still callable as the function it was."""

    def __init__(
        self, function: Function, name: str = "", description: str = "", per_sample: Sequence[str] = ()
    ) -> None:
        definition = _definition(function)
        self.function = function
        self.name = name = name or _function_name(definition)
        if inspect.isgeneratorfunction(definition) or inspect.isasyncgenfunction(definition):
            raise InputError(f"tool {name!r}: got a generator, expected a function that returns its result")
        parameters = _parameters(function, name)
        hints = _hints(definition, name)
        self._per_sample: dict[str, tuple[inspect.Parameter, Any]] = {}
        for given in per_sample:
            if given not in parameters:
                raise InputError(
                    f"per_sample of tool {name!r}: got {given!r}, expected one of {list(parameters)}"
                )
            if given == "trajectory":
                raise InputError(
                    f"per_sample of tool {name!r}: got 'trajectory', expected another name: "
                    "every tool is created for one"
                )
            parameter = parameters.pop(given)
            self._per_sample[given] = parameter, _parameter_type(parameter, hints, name)
        about, described = read_docstring(inspect.getdoc(definition) or "")
        known = list(inspect.signature(definition).parameters)
        for documented in described:
            if documented not in known:
                raise InputError(
                    f"docstring of tool {name!r}: describes {documented!r}, expected one of {known}"
                )
        shown = list(parameters.values())
        self._arguments_type = _arguments_struct(name, shown, hints)
        self.schema: Mapping[str, Any] = function_schema(
            name, description or about, _parameters_schema(name, self._arguments_type, shown, described)
        )

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self.function(*args, **named)

    async def create(self, trajectory: str, **arguments: Any) -> Any:
        expected = list(self._per_sample)
        for name in arguments:
            if name not in self._per_sample:
                raise InputError(f"tool_arguments: got {name!r}, expected only {expected}")
        for name, (parameter, _) in self._per_sample.items():
            if name not in arguments and parameter.default is parameter.empty:
                raise InputError(f"tool_arguments: {name!r} is missing, expected all of {expected}")
        return {
            name: _convert_argument(name, value, self._per_sample[name][1])
            for name, value in arguments.items()
        }

    async def execute(self, instance: Any, arguments: Mapping[str, Any]) -> ToolResult:
        model = msgspec.convert(arguments, self._arguments_type)
        given = {
            name: value for name in model.__struct_fields__ if (value := getattr(model, name)) is not UNSET
        }
        if inspect.iscoroutinefunction(self.function):
            value = await self.function(**given, **instance)
        else:
            value = await run_in_thread(self.function, **given, **instance)
            if inspect.isawaitable(value):
                # A wrapper around a coroutine function looks like a plain one.
                value = await value
        return to_tool_result(value)


def _convert_argument(name: str, value: Any, kind: Any) -> Any:
    """What a sample gives, as what the annotation says."""
    try:
        return msgspec.convert(value, kind)
    except (msgspec.ValidationError, TypeError) as error:
        raise InputError(f"tool_arguments: {name}: got {value!r}: {error}") from error


# -- the function ------------------------------------------------------------------------------------


def _definition(function: Function) -> Function:
    """Where annotations and docstring stand: the function in a partial, the `__call__` of an object."""
    if not callable(function) or isinstance(function, type):
        raise InputError(f"tool: got {function!r}, expected a function")
    while isinstance(function, functools.partial):
        function = function.func
    if hasattr(function, "__name__"):
        return function
    called: Function = type(function).__call__
    return called


def _function_name(definition: Function) -> str:
    name = definition.__name__
    if name in ("<lambda>", "__call__"):
        raise InputError(f"tool: got {definition!r}, expected a name with it: tool(…, name=…)")
    return name


def _parameters(function: Function, name: str) -> dict[str, inspect.Parameter]:
    """What can still be given: what a partial holds is settled."""
    parameters = dict(inspect.signature(function).parameters)
    while isinstance(function, functools.partial):
        for settled in function.keywords:
            parameters.pop(settled, None)
        function = function.func
    for place, parameter in enumerate(parameters.values()):
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise InputError(
                f"tool {name!r}: got parameter {str(parameter)!r}, expected one with a name of its own"
            )
        if parameter.annotation is not parameter.empty:
            continue
        if not place and parameter.name in ("self", "cls"):
            raise InputError(
                f"tool {name!r}: got a method that belongs to nobody yet, "
                f"expected a bound one: tool(thing.{name})"
            )
        raise InputError(
            f"tool {name!r}: parameter {parameter.name!r} has no annotation, expected one: "
            "the model is told what to send"
        )
    return parameters


def _hints(definition: Function, name: str) -> dict[str, Any]:
    try:
        return get_type_hints(definition, include_extras=True)
    except Exception as error:
        raise InputError(
            f"annotations of tool {name!r}: expected types that can be found, but {error}"
        ) from error


def _parameter_type(parameter: inspect.Parameter, hints: Mapping[str, Any], name: str) -> Any:
    """A parameter's type; a default of None says that null may be given, whatever the annotation says."""
    kind = hints[parameter.name]
    try:
        return to_msgspec_type(with_null(kind) if parameter.default is None else kind)
    except TypeError as error:
        raise InputError(
            f"annotations of tool {name!r}: {parameter.name}: got {kind!r}, expected a type, but {error}"
        ) from error


# -- the schema --------------------------------------------------------------------------------------


def _arguments_struct(
    name: str, parameters: Sequence[inspect.Parameter], hints: Mapping[str, Any]
) -> type[msgspec.Struct]:
    """A struct of the arguments. An argument left out is left to the function's own default."""
    fields: list[Any] = []
    for parameter in parameters:
        kind = _parameter_type(parameter, hints, name)
        if parameter.default is parameter.empty:
            fields.append((parameter.name, kind))
        else:
            fields.append((parameter.name, kind | UnsetType if kind is not Any else Any, UNSET))
    return msgspec.defstruct(name, fields, kw_only=True, forbid_unknown_fields=True)


def _parameters_schema(
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
