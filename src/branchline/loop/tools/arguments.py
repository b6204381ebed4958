"""The arguments of a tool call: parsed from JSON and validated against the tool's schema.

Parsing is strict, because the model is shown the error and can correct it. As in JSON Schema, `2.0` is the
integer `2`, so that a tool that expects an integer gets one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING, Any

from branchline.core.errors import InputError
from branchline.core.extras import requires_extra
from branchline.core.message import canonical_json
from branchline.core.reader import replace_surrogates_deep
from branchline.loop.tools.base import Tool

if TYPE_CHECKING:  # imported late below: a rollout of other agents needs no tools
    from jsonschema.exceptions import ValidationError
    from jsonschema.protocols import Validator

_MAX_SHOWN_PROBLEMS = 3
_MAX_SHOWN_CHARACTERS = 200
_CACHED_SCHEMAS = 512


def parse_arguments(text: str) -> dict[str, Any]:
    """The arguments of a call. Raises ValueError with a text for the model.

    >>> parse_arguments('{"a": 2.0}'), parse_arguments("")
    ({'a': 2}, {})
    """
    if not text or text.isspace():
        return {}
    try:
        value = json.loads(text, parse_float=_parse_number, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("nested too deep") from None
    if not isinstance(value, dict):
        raise ValueError(f"expected an object, got {type(value).__name__}")
    # A \u escape can be half a surrogate pair, which UTF-8 cannot encode.
    cleaned: dict[str, Any] = replace_surrogates_deep(value)
    return cleaned


def argument_validator(tool: Tool) -> Validator:
    """The validator of a tool's arguments. Raises InputError if its schema is invalid."""
    schema: object = getattr(tool, "schema", None)
    function = schema.get("function") if isinstance(schema, Mapping) else None
    if not isinstance(function, Mapping) or function.get("name") != tool.name:
        raise InputError(
            f"schema of tool {tool.name!r}: got {schema!r}, "
            f"expected {{'type': 'function', 'function': {{'name': {tool.name!r}, …}}}}"
        )
    with requires_extra():
        from jsonschema.exceptions import SchemaError
    try:
        return _cached_validator(canonical_json(function.get("parameters") or {}))
    except (SchemaError, TypeError, ValueError) as error:
        problem = error.message if isinstance(error, SchemaError) else str(error)
        raise InputError(
            f"parameters of tool {tool.name!r}: expected a JSON schema, but {problem}"
        ) from error


def argument_problems(validator: Validator, arguments: Mapping[str, Any]) -> str:
    """What does not fit the schema, as a text for the model; empty if everything fits."""
    errors = validator.iter_errors(arguments)
    problems = [_describe_violation(error) for error in islice(errors, _MAX_SHOWN_PROBLEMS)]
    if problems and next(errors, None) is not None:
        problems.append("and more")
    return "; ".join(problems)


@lru_cache(_CACHED_SCHEMAS)
def _cached_validator(schema_json: bytes) -> Validator:
    """Building a validator takes a hundred times as long as using it, and every trajectory needs one."""
    from jsonschema.validators import Draft202012Validator, validator_for
    from referencing import Registry

    schema = json.loads(schema_json)
    kind = validator_for(schema, default=Draft202012Validator)
    kind.check_schema(schema)
    # An empty registry prevents `$ref` from fetching a URL.
    return kind(schema, registry=Registry())


def _describe_violation(error: ValidationError) -> str:
    path = "".join([f"[{step}]" if isinstance(step, int) else f".{step}" for step in error.absolute_path])
    message = error.message
    if len(message) > _MAX_SHOWN_CHARACTERS:
        message = message[: _MAX_SHOWN_CHARACTERS - 1] + "…"
    return f"arguments{path}: {message}"


def _parse_number(text: str) -> float | int:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is too large a number")
    return int(value) if value.is_integer() else value


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
