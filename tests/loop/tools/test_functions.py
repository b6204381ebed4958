from __future__ import annotations

import asyncio
import contextvars
import datetime
import functools
import inspect
import re
import threading
from collections.abc import AsyncIterator, Awaitable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, Literal, NewType, Optional

import msgspec
import pytest
from annotated_types import Ge, Gt, Interval, Len, MultipleOf
from msgspec import Meta
from pydantic import Field
from typing_extensions import Doc

from branchline.core.errors import InputError, ToolError
from branchline.loop.tools.base import ToolResult
from branchline.loop.tools.functions import FunctionTool, read_docstring, to_msgspec_type, tool, with_null
from tests.hang import HANG_S
from tests.loop.fake_tools import call, run_calls, tool_session
from tests.loop.harness import move_clock, run
from tests.loop.tools.mcp_server import PIXEL


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


@dataclass
class Place:
    city: str
    zip: int = 0


@tool
def book(
    guests: int,
    where: Place,
    when: datetime.date,
    colour: Colour = Colour.RED,
    stars: Annotated[int, Meta(ge=1, le=5)] = 3,
    board: Literal["half", "full"] | None = None,
    tags: list[str] = [],  # noqa: B006
) -> dict[str, Any]:
    """Books a room.

    Only for tests: nothing is booked.

    Args:
        guests: How many people
            will come.
        where (Place): The place: a city.
        stars: At least one.

    Returns:
        What was booked.
    """
    return {"guests": guests, "city": where.city, "year": when.year, "colour": colour, "tags": tags}


def parameters(tool: FunctionTool) -> Any:
    return tool.schema["function"]["parameters"]


async def answer(tool: FunctionTool, arguments: str = "", **per_task: Any) -> str:
    async with tool_session(tool, arguments={tool.name: per_task}) as session:
        return (await session.run_one(call(tool.name, arguments))).content


# -- the schema --------------------------------------------------------------------------------------


def test_the_schema_comes_from_annotations_and_docstring() -> None:
    assert book.name == "book"
    function = book.schema["function"]
    assert function["description"] == "Books a room.\n\nOnly for tests: nothing is booked."
    schema = function["parameters"]
    assert schema["type"] == "object"
    assert schema["required"] == ["guests", "where", "when"]
    assert schema["additionalProperties"] is False
    properties = schema["properties"]
    assert properties["guests"] == {"type": "integer", "description": "How many people will come."}
    assert properties["where"] == {"$ref": "#/$defs/Place", "description": "The place: a city."}
    assert properties["when"] == {"type": "string", "format": "date"}
    assert properties["colour"] == {"$ref": "#/$defs/Colour", "default": "red"}
    assert properties["stars"] == {
        "type": "integer",
        "minimum": 1,
        "maximum": 5,
        "description": "At least one.",
        "default": 3,
    }
    assert properties["board"]["default"] is None
    assert properties["tags"] == {"type": "array", "items": {"type": "string"}, "default": []}
    assert schema["$defs"]["Place"]["required"] == ["city"]


def test_name_and_description_can_be_given() -> None:
    @tool(name="other", description="Says so.")
    def plain(value: Any = None) -> str:
        """Not this."""
        return "x"

    assert plain.schema["function"] == {
        "name": "other",
        "description": "Says so.",
        "parameters": {
            "type": "object",
            "properties": {"value": {"default": None}},
            "required": [],
            "additionalProperties": False,
        },
    }


def test_the_name_can_be_the_only_argument() -> None:
    @tool("search")
    def look(query: str) -> str:
        return query

    assert look.name == look.schema["function"]["name"] == "search"
    assert tool(look.function, name="find").name == "find"


def test_arguments_of_a_partial_are_not_in_the_schema() -> None:
    def move(what: str, by: int, slowly: bool = False) -> str:
        """Moves.

        Args:
            what: The thing.
            by: How far.
        """
        return f"{what} {by} {slowly}"

    async def test() -> None:
        mover = tool(functools.partial(functools.partial(move, "chair"), by=2))
        assert mover.schema["function"]["description"] == "Moves."
        assert parameters(mover)["properties"] == {"slowly": {"type": "boolean", "default": False}}
        assert mover.name == "move"
        assert await answer(mover, '{"slowly": true}') == "chair 2 True"
        assert "'by' was unexpected" in await answer(mover, '{"by": 3}')

    run(test)


def test_bound_methods_and_callable_objects_can_be_tools() -> None:
    async def test() -> None:
        shelf = Shelf("ants", "bees")
        assert await answer(tool(shelf.find), '{"word": "b"}') == '["bees"]'
        take = tool(shelf, name="take")
        assert take.schema["function"]["description"] == "Takes a book."
        assert parameters(take)["properties"]["index"]["description"] == "From the left."
        assert await answer(take, '{"index": 0}') == "ants"
        assert await answer(tool(staticmethod(shelf.find)), '{"word": "a"}') == '["ants"]'

    run(test)


def test_metadata_of_annotations_is_in_the_schema_and_enforced() -> None:
    @tool
    def pick(
        query: Annotated[str, "What to look for."],
        limit: Annotated[int | None, Field(ge=3, description="How many.")] = 5,
        sizes: list[Annotated[int, Gt(0)]] = [],  # noqa: B006
    ) -> str:
        """Picks.

        Args:
            sizes: Of each.
        """
        return f"{query} {limit}"

    async def test() -> None:
        properties = parameters(pick)["properties"]
        assert properties["query"] == {"type": "string", "description": "What to look for."}
        assert properties["limit"]["description"] == "How many."
        assert properties["limit"]["anyOf"] == [{"type": "integer", "minimum": 3}, {"type": "null"}]
        assert properties["sizes"]["items"] == {"type": "integer", "exclusiveMinimum": 0}
        assert properties["sizes"]["description"] == "Of each."
        assert await answer(pick, '{"query": "x", "limit": 3}') == "x 3"
        assert "arguments.limit: 2 is not valid" in await answer(pick, '{"query": "x", "limit": 2}')
        assert "0 is less than or equal to" in await answer(pick, '{"query": "x", "sizes": [0]}')

    run(test)


def test_a_default_of_none_allows_null() -> None:
    @tool
    def look(limit: Annotated[int, "How many."] = None) -> str:  # type: ignore[assignment]  # noqa: RUF013
        return str(limit)

    async def test() -> None:
        (field,) = parameters(look)["properties"].values()
        assert field["anyOf"] == [{"type": "integer"}, {"type": "null"}]
        assert (field["default"], field["description"]) == (None, "How many.")
        assert [await answer(look, arguments) for arguments in ('{"limit": null}', "{}", '{"limit": 3}')] == [
            "None",
            "None",
            "3",
        ]

    run(test)


NOT_JSON = object()


def test_a_default_that_json_cannot_express_is_left_out() -> None:
    @tool
    def look(deep: float = float("inf"), way: Any = NOT_JSON) -> str:
        return "x"

    assert parameters(look)["properties"] == {"deep": {"type": "number"}, "way": {}}


def test_a_tool_can_be_called_as_the_function() -> None:
    assert book(1, Place("Rome"), datetime.date(2030, 1, 1))["city"] == "Rome"


def no_annotation(a) -> str:  # type: ignore[no-untyped-def]
    return "x"


def many(*words: str) -> str:
    return "x"


def anything(**named: str) -> str:
    return "x"


def unknown_type(a: NoSuchThing) -> str:  # type: ignore[name-defined]  # noqa: F821
    return "x"


def no_json(a: threading.Thread) -> str:
    return "x"


def misspelt(guests: int) -> str:
    """Books.

    Args:
        gusets: How many.
    """
    return "x"


def numbers(most: int) -> Iterator[int]:
    yield from range(most)


async def later(most: int) -> AsyncIterator[int]:
    yield most


class Shelf:
    def __init__(self, *books: str) -> None:
        self.books = books

    def find(self, word: str) -> list[str]:
        """Finds books."""
        return [book for book in self.books if word in book]

    async def __call__(self, index: int) -> str:
        """Takes a book.

        Args:
            index: From the left.
        """
        return self.books[index]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (numbers, "tool 'numbers': got a generator, expected a function that returns its result"),
        (later, "tool 'later': got a generator"),
        (Shelf.find, r"tool 'find': got an unbound method, expected a bound one: tool\(instance.find\)"),
        (Shelf("a"), r"tool: got .*__call__.*, expected a name with it"),
        (lambda: 1, "tool: got .*<lambda>.*, expected a name with it"),
        (functools.partial(lambda: 1), "tool: got .*<lambda>.*, expected a name with it"),
        (Shelf, "tool: got <class .*Shelf'>, expected a function"),
        (3, "tool: got 3, expected a function"),
        (classmethod(no_annotation), "tool: got <classmethod.*, expected a function"),
        (no_annotation, "tool 'no_annotation': parameter 'a' has no annotation"),
        (many, r"tool 'many': got parameter .*\*words.*, expected one that can be passed by name"),
        (anything, r"tool 'anything': got parameter .*\*\*named"),
        (unknown_type, "annotations of tool 'unknown_type': .*NoSuchThing"),
        (no_json, "annotations of tool 'no_json': expected types that JSON can carry"),
        (misspelt, r"docstring of tool 'misspelt': describes 'gusets', expected one of \['guests'\]"),
    ],
)
def test_a_function_that_cannot_be_a_tool_is_refused(function: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        tool(function)


# -- calls -------------------------------------------------------------------------------------------


def test_arguments_are_converted_to_the_annotated_types() -> None:
    async def test() -> None:
        arguments = '{"guests": 2.0, "where": {"city": "Rome"}, "when": "2030-05-01", "colour": "blue"}'
        assert (
            await answer(book, arguments)
            == '{"guests":2,"city":"Rome","year":2030,"colour":"blue","tags":[]}'
        )

    run(test)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            '{"guests": "two", "where": {"city": "Rome"}, "when": "2030-05-01"}',
            "arguments.guests: 'two' is not",
        ),
        (
            '{"guests": 2, "where": {}, "when": "2030-05-01"}',
            "arguments.where: 'city' is a required property",
        ),
        ('{"guests": 2, "where": {"city": "Rome"}, "when": "May"}', "Invalid RFC3339 encoded date"),
        ('{"guests": 2, "where": {"city": "R"}, "when": "2030-05-01", "stars": 6}', "6 is greater than"),
        ('{"gusets": 2}', "'gusets' was unexpected"),
    ],
)
def test_arguments_that_do_not_fit_are_an_error_for_the_model(arguments: str, message: str) -> None:
    async def test() -> None:
        text = await answer(book, arguments)
        assert text.startswith("Error executing tool 'book': ")
        assert message in text

    run(test)


def test_coroutine_functions_run_on_the_event_loop_and_plain_ones_in_a_thread() -> None:
    variable = contextvars.ContextVar("variable", default="unset")
    threads: list[threading.Thread] = []

    @tool
    async def async_tool() -> str:
        threads.append(threading.current_thread())
        return variable.get()

    @tool
    def sync_tool() -> str:
        threads.append(threading.current_thread())
        return variable.get()

    @tool
    def wrapped() -> Awaitable[str]:
        return async_tool()  # type: ignore[no-any-return]

    async def test() -> None:
        variable.set("set")
        assert await answer(async_tool) == "set"
        assert await answer(sync_tool) == "set"
        assert await answer(wrapped) == "set"
        event_loop_thread = threading.current_thread()
        assert [thread is event_loop_thread for thread in threads] == [True, False, True]

    run(test)


def test_return_values_become_results() -> None:
    @tool
    def paint() -> list[Any]:
        return ["a pixel", PIXEL]

    @tool
    def grade() -> ToolResult:
        return ToolResult("good", reward=1.0, extras={"why": "so"})

    async def test() -> None:
        async with tool_session(paint, grade) as session:
            painted, graded = await run_calls(session, call("paint"), call("grade"))
        assert painted.content == "a pixel"
        assert painted.media[0].payload == PIXEL
        assert (graded.reward, graded.extras) == (1.0, {"why": "so"})

    run(test)


def test_a_thread_that_exceeds_the_limit_is_an_error_and_continues() -> None:
    go = threading.Event()

    async def test() -> None:
        loop, started, ended = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()

        @tool
        def stuck() -> str:
            loop.call_soon_threadsafe(started.set)
            assert go.wait(HANG_S)
            loop.call_soon_threadsafe(ended.set)
            return "too late"

        async with tool_session(stuck, tool_timeout_s=5) as session:
            running = asyncio.create_task(session.run_one(call("stuck")))
            await started.wait()
            move_clock(5)
            assert (await running).error == "Error executing tool 'stuck': timed out after 5 s"
            assert not ended.is_set()
        go.set()
        await ended.wait()
        # The abandoned task ends when its thread has.
        abandoned = [task for task in asyncio.all_tasks() if task.get_name() == "FunctionTool.execute"]
        if abandoned:
            await asyncio.wait(abandoned)

    run(test)


# -- per sample --------------------------------------------------------------------------------------


@tool(per_task=["secret", "factor"])
def guess(number: int, secret: int, factor: int = 1) -> str:
    """Says whether a number is the secret.

    Args:
        number: What you think it is.
        secret: What it is.
    """
    return "yes" if number == secret * factor else "no"


def test_per_task_parameters_are_not_in_the_schema() -> None:
    assert list(parameters(guess)["properties"]) == ["number"]


def test_per_task_parameters_come_from_tool_arguments() -> None:
    async def test() -> None:
        assert await answer(guess, '{"number": 7}', secret=7) == "yes"
        assert await answer(guess, '{"number": 7}', secret=7, factor=2) == "no"
        text = await answer(guess, '{"number": 7, "secret": 7}', secret=8)
        assert "'secret' was unexpected" in text, "the model cannot set it"

    run(test)


def test_missing_and_unknown_tool_arguments_are_refused() -> None:
    async def test() -> None:
        with pytest.raises(ToolError, match="tool 'guess': create: tool_arguments: 'secret' is missing"):
            await answer(guess)
        with pytest.raises(ToolError, match=r"got 'sceret', expected only \['secret', 'factor'\]"):
            await answer(guess, secret=1, sceret=2)

    run(test)


def test_tool_arguments_are_converted_to_the_annotated_types() -> None:
    @tool(per_task=("answer", "since", "limit"))
    def grade(answer: int, since: datetime.date, limit: int = None) -> str:  # type: ignore[assignment]  # noqa: RUF013
        return f"{answer + 1} {since.year} {limit}"

    async def test() -> None:
        assert await answer(grade, "{}", answer=5, since="2030-01-01", limit=None) == "6 2030 None"
        with pytest.raises(
            ToolError, match="create: tool_arguments: answer: got '5': Expected `int`, got `str`"
        ):
            await answer(grade, "{}", answer="5", since="2030-01-01")

    run(test)


def test_unknown_per_task_parameters_are_refused() -> None:
    with pytest.raises(InputError, match="per_task of tool 'follow': got 'trajectory', expected another"):

        @tool(per_task=["trajectory"])
        def follow(trajectory: str) -> str:
            return trajectory

    with pytest.raises(InputError, match=r"per_task of tool 'plain': got 'b', expected one of \['a'\]"):

        @tool(per_task=["b"])
        def plain(a: int) -> str:
            return "x"


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
def test_metadata_becomes_msgspec_metadata(kind: Any, schema: Any) -> None:
    assert msgspec.json.schema(to_msgspec_type(kind)) == schema


def test_a_constraint_that_does_not_fit_its_type_is_refused() -> None:
    with pytest.raises(TypeError, match="Can only set `ge` on a numeric type"):
        msgspec.json.schema(to_msgspec_type(Annotated[str, Ge(3)]))


def test_null_is_added_inside_the_metadata() -> None:
    assert with_null(int) == Optional[int]  # noqa: UP045
    assert with_null(Any) is Any
    assert with_null(int | None) == int | None
    schema = msgspec.json.schema(to_msgspec_type(with_null(Annotated[int, Ge(1), "a number"])))
    assert schema == {
        "description": "a number",
        "anyOf": [{"type": "integer", "minimum": 1}, {"type": "null"}],
    }


QUERY = {"query": "What to look for.", "limit": "How many, at most."}


def read(doc: str) -> tuple[str, dict[str, str]]:
    return read_docstring(inspect.cleandoc(doc))


GOOGLE = """Finds pages.

    Of the whole web.

    Args:
        query (str): What to look for.
        limit: How many,
            at most.

    Returns:
        url: Where it is.
    """
SPHINX = """Finds pages.

    Of the whole web.

    :param str query: What to look for.
    :param limit: How many,
        at most.
    :type limit: int
    :returns: Where
        it is.
    :raises ValueError: never
    """
NUMPY = """Finds pages.

    Of the whole web.

    Parameters
    ----------
    query : str
        What to look for.
    limit
        How many,
        at most.

    Returns
    -------
    url : str
        Where it is.
    """


@pytest.mark.parametrize("doc", [GOOGLE, SPHINX, NUMPY], ids=["google", "sphinx", "numpy"])
def test_all_docstring_styles_are_equivalent(doc: str) -> None:
    assert read(doc) == ("Finds pages.\n\nOf the whole web.", QUERY)


def test_numpy_parameters_can_share_a_description() -> None:
    doc = """Adds.

    Parameters
    ----------
    a, b : int
        A number.
    """
    assert read(doc) == ("Adds.", {"a": "A number.", "b": "A number."})
    assert read("") == ("", {})


def test_a_sentence_after_numpy_parameters_is_no_parameter() -> None:
    doc = NUMPY.partition("    Returns")[0] + "    It is slow at night.\n"
    assert read(doc)[1] == QUERY
