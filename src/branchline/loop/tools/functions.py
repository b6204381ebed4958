"""Python functions as tools: `@tool` builds the schema from annotations and docstring.

    @tool
    def search(query: Annotated[str, "What to look for."], limit: int = 3) -> list[str]:
        \"\"\"Finds pages.

        Args:
            limit: The maximum number of pages.
        \"\"\"

Arguments arrive as the annotated types: enums, dates, dataclasses and structs included. Metadata of
`Annotated` may be a text, PEP 727's `Doc`, msgspec's `Meta`, pydantic's `Field` or annotated_types; the last
two are read by attribute, so neither has to be installed. A synchronous function runs in a thread. A thread
cannot be cancelled: after a timeout the model gets an error, but the function runs until it returns.
"""

from __future__ import annotations

import functools
import inspect
import json
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints, overload

import msgspec
from msgspec import UNSET, Meta, UnsetType

from branchline.core.errors import InputError
from branchline.core.extras import requires_extra
from branchline.core.message import canonical_json
from branchline.loop.timeouts import run_in_thread
from branchline.loop.tools.base import BaseTool, ToolResult, function_schema, to_tool_result

Function = Callable[..., Any]
_CONSTRAINTS = ("gt", "ge", "lt", "le", "multiple_of", "min_length", "max_length")


@overload
def tool(
    function: Function,
    /,
    *,
    name: str = "",
    description: str = "",
    per_task: Sequence[str] = (),
    repeatable: bool = False,
) -> FunctionTool: ...
@overload
def tool(
    tool_name: str = "",
    /,
    *,
    name: str = "",
    description: str = "",
    per_task: Sequence[str] = (),
    repeatable: bool = False,
) -> Callable[[Function], FunctionTool]: ...
def tool(
    function: Function | str = "",
    /,
    *,
    name: str = "",
    description: str = "",
    per_task: Sequence[str] = (),
    repeatable: bool = False,
) -> FunctionTool | Callable[[Function], FunctionTool]:
    """Makes a function a tool: `@tool`, `@tool("name")` or `tool(function, name=…)`.

    `per_task` names parameters that the model does not see: they come from the task's `tool_arguments`.
    `repeatable`: a call that was cancelled while it ran can run again without its effect counting twice.
    """
    if not isinstance(function, str):
        return FunctionTool(function, name, description, per_task, repeatable)
    tool_name = name or function
    return lambda function: FunctionTool(function, tool_name, description, per_task, repeatable)


class FunctionTool(BaseTool):
    """A function and its schema; it can still be called as the function."""

    def __init__(
        self,
        function: Function,
        name: str = "",
        description: str = "",
        per_task: Sequence[str] = (),
        repeatable: bool = False,
    ) -> None:
        definition = _definition(function)
        self.function = function
        self.is_repeatable = repeatable
        self.name = name = name or _function_name(definition)
        if inspect.isgeneratorfunction(definition) or inspect.isasyncgenfunction(definition):
            raise InputError(f"tool {name!r}: got a generator, expected a function that returns its result")
        parameters = _parameters(function, name)
        hints = _hints(definition, name)
        self._per_task: dict[str, tuple[inspect.Parameter, Any]] = {}
        for parameter_name in per_task:
            if parameter_name not in parameters:
                raise InputError(
                    f"per_task of tool {name!r}: got {parameter_name!r}, expected one of {list(parameters)}"
                )
            if parameter_name == "trajectory":
                raise InputError(
                    f"per_task of tool {name!r}: got 'trajectory', expected another name: "
                    "it is the first parameter of every `create`"
                )
            parameter = parameters.pop(parameter_name)
            self._per_task[parameter_name] = parameter, _parameter_type(parameter, hints, name)
        summary, descriptions = read_docstring(inspect.getdoc(definition) or "")
        signature = list(inspect.signature(definition).parameters)
        for documented in descriptions:
            if documented not in signature:
                raise InputError(
                    f"docstring of tool {name!r}: describes {documented!r}, expected one of {signature}"
                )
        shown = list(parameters.values())
        self._arguments_type = _arguments_struct(name, shown, hints)
        schema = _parameters_schema(name, self._arguments_type, shown, descriptions)
        self.schema: Mapping[str, Any] = function_schema(name, description or summary, schema)

    @property
    def is_stateful(self) -> bool:
        return False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    async def create(self, trajectory: str, **arguments: Any) -> Any:
        expected = list(self._per_task)
        for name in arguments:
            if name not in self._per_task:
                raise InputError(f"tool_arguments: got {name!r}, expected only {expected}")
        for name, (parameter, _) in self._per_task.items():
            if name not in arguments and parameter.default is parameter.empty:
                raise InputError(f"tool_arguments: {name!r} is missing, expected all of {expected}")
        return {
            name: _convert_argument(name, value, self._per_task[name][1]) for name, value in arguments.items()
        }

    async def execute(self, instance: Any, arguments: Mapping[str, Any]) -> ToolResult:
        converted = msgspec.convert(arguments, self._arguments_type)
        fields = {name: getattr(converted, name) for name in converted.__struct_fields__}
        kwargs = {name: value for name, value in fields.items() if value is not UNSET}
        if inspect.iscoroutinefunction(self.function):
            value = await self.function(**kwargs, **instance)
        else:
            value = await run_in_thread(self.function, **kwargs, **instance)
            if inspect.isawaitable(value):
                # A wrapper around a coroutine function is no coroutine function itself.
                value = await value
        return to_tool_result(value)


def _convert_argument(name: str, value: Any, kind: Any) -> Any:
    try:
        return msgspec.convert(value, kind)
    except (msgspec.ValidationError, TypeError) as error:
        raise InputError(f"tool_arguments: {name}: got {value!r}: {error}") from error


# -- the function ------------------------------------------------------------------------------------


def _definition(function: Function) -> Function:
    """The function that has annotations and docstring: a partial's function, an object's `__call__`."""
    if not callable(function) or isinstance(function, type):
        raise InputError(f"tool: got {function!r}, expected a function")
    while isinstance(function, functools.partial):
        function = function.func
    if hasattr(function, "__name__"):
        return function
    call_method: Function = type(function).__call__
    return call_method


def _function_name(definition: Function) -> str:
    name = definition.__name__
    if name in ("<lambda>", "__call__"):
        raise InputError(f"tool: got {definition!r}, expected a name with it: tool(…, name=…)")
    return name


def _parameters(function: Function, name: str) -> dict[str, inspect.Parameter]:
    """The parameters that can still be passed: not those that a partial has set."""
    parameters = dict(inspect.signature(function).parameters)
    while isinstance(function, functools.partial):
        for bound in function.keywords:
            parameters.pop(bound, None)
        function = function.func
    for index, parameter in enumerate(parameters.values()):
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise InputError(
                f"tool {name!r}: got parameter {str(parameter)!r}, expected one that can be passed by name"
            )
        if parameter.annotation is not parameter.empty:
            continue
        if not index and parameter.name in ("self", "cls"):
            raise InputError(
                f"tool {name!r}: got an unbound method, expected a bound one: tool(instance.{name})"
            )
        raise InputError(
            f"tool {name!r}: parameter {parameter.name!r} has no annotation, expected one: "
            "the schema is built from it"
        )
    return parameters


def _hints(definition: Function, name: str) -> dict[str, Any]:
    try:
        return get_type_hints(definition, include_extras=True)
    except Exception as error:
        raise InputError(
            f"annotations of tool {name!r}: expected types that can be resolved, but {error}"
        ) from error


def _parameter_type(parameter: inspect.Parameter, hints: Mapping[str, Any], name: str) -> Any:
    """A parameter's type; a default of None allows null, whatever the annotation says."""
    kind = hints[parameter.name]
    try:
        return to_msgspec_type(with_null(kind) if parameter.default is None else kind)
    except TypeError as error:
        raise InputError(
            f"annotations of tool {name!r}: {parameter.name}: got {kind!r}, expected a type, but {error}"
        ) from error


def read_docstring(doc: str) -> tuple[str, dict[str, str]]:
    """The description, and the description of each parameter, from Google, NumPy or Sphinx style.

    >>> read_docstring("Finds pages.\\n\\nArgs:\\n    query: What to look for.")
    ('Finds pages.', {'query': 'What to look for.'})
    """
    with requires_extra():
        import docstring_parser

    parsed = docstring_parser.parse(doc)
    descriptions: dict[str, str] = {}
    for parameter in parsed.params:
        for name in parameter.arg_name.split(","):
            # In NumPy style a sentence after the parameters is parsed as a parameter without description.
            if parameter.description and name.strip(" *").isidentifier():
                descriptions[name.strip(" *")] = " ".join(parameter.description.split())
    return (parsed.description or "").strip(), descriptions


# -- the schema --------------------------------------------------------------------------------------


def _arguments_struct(
    name: str, parameters: Sequence[inspect.Parameter], hints: Mapping[str, Any]
) -> type[msgspec.Struct]:
    """A struct of the arguments. One that is absent is UNSET, so that the function's default applies."""
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
    struct: type[msgspec.Struct],
    parameters: Sequence[inspect.Parameter],
    descriptions: Mapping[str, str],
) -> dict[str, Any]:
    try:
        document = msgspec.json.schema(struct)
    except TypeError as error:
        raise InputError(
            f"annotations of tool {name!r}: expected types that JSON can carry, but {error}"
        ) from error
    definitions = dict(document["$defs"])
    schema = dict(definitions.pop(document["$ref"].rpartition("/")[2]))
    schema.pop("title")
    for parameter in parameters:
        field = schema["properties"][parameter.name]
        if parameter.name in descriptions:
            field["description"] = descriptions[parameter.name]
        if parameter.default is not parameter.empty:
            try:
                field["default"] = json.loads(canonical_json(msgspec.to_builtins(parameter.default)))
            except (TypeError, ValueError):
                # A default that JSON cannot express is left out of the schema.
                continue
    return {**schema, "$defs": definitions} if definitions else schema


# -- annotations -------------------------------------------------------------------------------------


def to_msgspec_type(kind: Any) -> Any:
    """The type with its metadata as msgspec's `Meta`. Raises TypeError if a constraint does not fit."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _with_metadata(to_msgspec_type(args[0]), kind.__metadata__)
    if origin in (Union, UnionType):
        return functools.reduce(operator.or_, [to_msgspec_type(arg) for arg in args])
    if isinstance(origin, type) and args:
        # Literal's arguments are values and Callable's are lists; those of classes are types.
        return origin[tuple(arg if arg is ... else to_msgspec_type(arg) for arg in args)]  # type: ignore[index]
    return kind


def with_null(kind: Any) -> Any:
    """The type or None; metadata stays outermost."""
    if get_origin(kind) is Annotated:
        return Annotated[(with_null(get_args(kind)[0]), *kind.__metadata__)]
    return kind if kind in (Any, None) else kind | None


def _with_metadata(kind: Any, metadata: Iterable[Any]) -> Any:
    for note in metadata:
        if isinstance(note, Meta):
            kind = Annotated[kind, note]
            continue
        for constraint in _constraints(note):
            kind = _constrained(kind, constraint)
        if text := _description(note):
            kind = Annotated[kind, Meta(description=text)]
    return kind


def _constrained(kind: Any, constraint: Meta) -> Any:
    """In a union every member but None is constrained."""
    if get_origin(kind) in (Union, UnionType):
        members = [arg if arg is NoneType else _constrained(arg, constraint) for arg in get_args(kind)]
        return functools.reduce(operator.or_, members)
    return Annotated[kind, constraint]


def _description(note: Any) -> str:
    """The text of a note: a string, pydantic's `Field.description` or PEP 727's `Doc.documentation`."""
    if isinstance(note, str):
        return note
    for name in ("description", "documentation"):
        if isinstance(text := getattr(note, name, None), str):
            return text
    return ""


def _constraints(note: Any) -> list[Meta]:
    """The constraints of a note: its own attributes, or those of the notes in its `metadata`."""
    nested = getattr(note, "metadata", None)
    if isinstance(nested, list | tuple):
        return [constraint for inner in nested for constraint in _constraints(inner)]
    if isinstance(note, str | type):
        return []
    found: list[dict[str, Any]] = [
        {name: value}
        for name in _CONSTRAINTS
        if isinstance(value := getattr(note, name, None), int | float) and not isinstance(value, bool)
    ]
    pattern = getattr(note, "pattern", None)
    if isinstance(pattern := getattr(pattern, "pattern", pattern), str):
        found.append({"pattern": pattern})
    return [Meta(**constraint) for constraint in found]
