from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NewType, Optional

import msgspec
import pytest
from annotated_types import Ge, Interval, Len, MultipleOf
from msgspec import Meta
from pydantic import Field
from typing_extensions import Doc

from branchline.loop.tools.annotations import to_msgspec_type, with_null

Number = NewType("Number", int)


@pytest.mark.parametrize(
    ("kind", "schema"),
    [
        (Annotated[str, "a word"], {"type": "string", "description": "a word"}),
        (Annotated[str, Doc("a word")], {"type": "string", "description": "a word"}),
        (
            Annotated[int, Field(ge=3, description="a number")],
            {"type": "integer", "minimum": 3, "description": "a number"},
        ),
        (Annotated[int, Ge(1), Meta(le=5)], {"type": "integer", "minimum": 1, "maximum": 5}),
        (Annotated[float, MultipleOf(0.5)], {"type": "number", "multipleOf": 0.5}),
        (
            dict[str, Annotated[int, Interval(gt=0, lt=9)]],
            {
                "type": "object",
                "additionalProperties": {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 9},
            },
        ),
        (
            Annotated[list[int], Len(1, 2)],
            {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 2},
        ),
        (
            Mapping[str, Annotated[str, Field(pattern="^a", max_length=4)]],
            {"type": "object", "additionalProperties": {"type": "string", "pattern": "^a", "maxLength": 4}},
        ),
        (Annotated[str, re.compile("b$")], {"type": "string", "pattern": "b$"}),
        (
            Annotated[Optional[int], Field(gt=2)],  # noqa: UP045
            {"anyOf": [{"type": "integer", "exclusiveMinimum": 2}, {"type": "null"}]},
        ),
        (tuple[int, ...], {"type": "array", "items": {"type": "integer"}}),
        (Literal["a"], {"enum": ["a"]}),
        (Number, {"type": "integer"}),
        (Annotated[Any, 1], {}),
    ],
)
def test_what_is_said_beside_a_type_is_kept(kind: Any, schema: Any) -> None:
    assert msgspec.json.schema(to_msgspec_type(kind)) == schema


def test_what_cannot_be_meant_of_a_type_is_refused_by_the_schema() -> None:
    with pytest.raises(TypeError, match="Can only set `ge` on a numeric type"):
        msgspec.json.schema(to_msgspec_type(Annotated[str, Ge(3)]))


def test_null_goes_beside_a_type_and_not_beside_what_is_said_of_it() -> None:
    assert with_null(int) == Optional[int]  # noqa: UP045
    assert with_null(Any) is Any
    assert with_null(int | None) == int | None
    schema = msgspec.json.schema(to_msgspec_type(with_null(Annotated[int, Ge(1), "a number"])))
    assert schema == {
        "description": "a number",
        "anyOf": [{"type": "integer", "minimum": 1}, {"type": "null"}],
    }
