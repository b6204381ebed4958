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
from tests.loop.fake_tools import call, tool_session
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


async def answer(tool: FunctionTool, arguments: str = "", **per_sample: Any) -> str:
    async with tool_session(tool, arguments={tool.name: per_sample}) as workshop:
        (outcome,) = await workshop.run([call(tool.name, arguments)])
    return outcome.message.content


# -- the schema --------------------------------------------------------------------------------------


def test_the_schema_says_what_annotations_and_docstring_say() -> None:
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


def test_a_name_may_stand_alone_as_with_agents() -> None:
    @tool("search")
    def look(query: str) -> str:
        return query

    assert look.name == look.schema["function"]["name"] == "search"
    assert tool(look.function, name="find").name == "find"


def test_what_a_partial_holds_is_settled_and_not_shown() -> None:
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


def test_bound_methods_and_objects_that_can_be_called_are_functions_too() -> None:
    async def test() -> None:
        shelf = Shelf("ants", "bees")
        assert await answer(tool(shelf.find), '{"word": "b"}') == '["bees"]'
        take = tool(shelf, name="take")
        assert take.schema["function"]["description"] == "Takes a book."
        assert parameters(take)["properties"]["index"]["description"] == "From the left."
        assert await answer(take, '{"index": 0}') == "ants"
        assert await answer(tool(staticmethod(shelf.find)), '{"word": "a"}') == '["ants"]'

    run(test)


def test_what_is_said_beside_a_type_is_told_to_the_model_and_kept_to() -> None:
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


def test_a_default_of_none_can_be_sent_back() -> None:
    @tool
    def look(limit: Annotated[int, "How many."] = None) -> str:  # type: ignore[assignment]  # noqa: RUF013
        return str(limit)

    async def test() -> None:
        (field,) = parameters(look)["properties"].values()
        assert field["anyOf"] == [{"type": "integer"}, {"type": "null"}]
        assert (field["default"], field["description"]) == (None, "How many.")
        assert [await answer(look, given) for given in ('{"limit": null}', "{}", '{"limit": 3}')] == [
            "None",
            "None",
            "3",
        ]

    run(test)


NOT_JSON = object()


def test_a_default_that_json_cannot_spell_is_left_out() -> None:
    @tool
    def look(deep: float = float("inf"), way: Any = NOT_JSON) -> str:
        return "x"

    assert parameters(look)["properties"] == {"deep": {"type": "number"}, "way": {}}


def test_a_tool_is_still_the_function_it_was() -> None:
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

    async def __call__(self, place: int) -> str:
        """Takes a book.

        Args:
            place: From the left.
        """
        return self.books[place]


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (numbers, "tool 'numbers': got a generator, expected a function that returns its result"),
        (later, "tool 'later': got a generator"),
        (Shelf.find, r"tool 'find': got a method .*, expected a bound one: tool\(thing.find\)"),
        (Shelf("a"), r"tool: got .*__call__.*, expected a name with it"),
        (lambda: 1, "tool: got .*<lambda>.*, expected a name with it"),
        (functools.partial(lambda: 1), "tool: got .*<lambda>.*, expected a name with it"),
        (Shelf, "tool: got <class .*Shelf'>, expected a function"),
        (3, "tool: got 3, expected a function"),
        (classmethod(no_annotation), "tool: got <classmethod.*, expected a function"),
        (no_annotation, "tool 'no_annotation': parameter 'a' has no annotation"),
        (many, r"tool 'many': got parameter .*\*words.*, expected one with a name of its own"),
        (anything, r"tool 'anything': got parameter .*\*\*named"),
        (unknown_type, "annotations of tool 'unknown_type': .*NoSuchThing"),
        (no_json, "annotations of tool 'no_json': expected types that JSON can carry"),
        (misspelt, r"docstring of tool 'misspelt': describes 'gusets', expected one of \['guests'\]"),
    ],
)
def test_a_function_a_model_could_not_call_is_refused_where_it_is_made(function: Any, why: str) -> None:
    with pytest.raises(InputError, match=why):
        tool(function)


# -- calls -------------------------------------------------------------------------------------------


def test_arguments_arrive_as_what_the_annotations_say() -> None:
    async def test() -> None:
        given = '{"guests": 2.0, "where": {"city": "Rome"}, "when": "2030-05-01", "colour": "blue"}'
        assert await answer(book, given) == '{"guests":2,"city":"Rome","year":2030,"colour":"blue","tags":[]}'

    run(test)


@pytest.mark.parametrize(
    ("given", "why"),
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
def test_arguments_that_do_not_fit_are_told_to_the_model(given: str, why: str) -> None:
    async def test() -> None:
        text = await answer(book, given)
        assert text.startswith("Error executing tool 'book': ")
        assert why in text

    run(test)


def test_coroutine_functions_run_on_the_loop_and_plain_ones_in_a_thread() -> None:
    variable = contextvars.ContextVar("variable", default="unset")
    threads: list[threading.Thread] = []

    @tool
    async def here() -> str:
        threads.append(threading.current_thread())
        return variable.get()

    @tool
    def there() -> str:
        threads.append(threading.current_thread())
        return variable.get()

    @tool
    def wrapped() -> Awaitable[str]:
        return here()  # type: ignore[no-any-return]

    async def test() -> None:
        variable.set("set")
        assert await answer(here) == "set"
        assert await answer(there) == "set"
        assert await answer(wrapped) == "set"
        mine = threading.current_thread()
        assert [thread is mine for thread in threads] == [True, False, True]

    run(test)


def test_what_a_function_returns_becomes_a_result() -> None:
    @tool
    def paint() -> list[Any]:
        return ["a pixel", PIXEL]

    @tool
    def judge() -> ToolResult:
        return ToolResult("good", reward=1.0, extras={"why": "so"})

    async def test() -> None:
        async with tool_session(paint, judge) as workshop:
            painted, judged = await workshop.run([call("paint"), call("judge")])
        assert painted.message.content == "a pixel"
        assert painted.message.media[0].payload == PIXEL
        assert (judged.reward, judged.extras) == (1.0, {"why": "so"})

    run(test)


def test_a_thread_that_takes_too_long_is_answered_though_it_cannot_be_stopped() -> None:
    go = threading.Event()

    async def test() -> None:
        loop, began, ended = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()

        @tool
        def stuck() -> str:
            loop.call_soon_threadsafe(began.set)
            assert go.wait(20)
            loop.call_soon_threadsafe(ended.set)
            return "too late"

        async with tool_session(stuck, timeout_s=5) as workshop:
            running = asyncio.create_task(workshop.run([call("stuck")]))
            await began.wait()
            move_clock(5)
            (outcome,) = await running
            assert outcome.error == "Error executing tool 'stuck': timed out after 5 s"
            assert not ended.is_set()
        go.set()
        await ended.wait()

    run(test)


# -- per sample --------------------------------------------------------------------------------------


@tool(per_sample=["secret", "factor"])
def guess(number: int, secret: int, factor: int = 1) -> str:
    """Says whether a number is the secret.

    Args:
        number: What you think it is.
        secret: What it is.
    """
    return "yes" if number == secret * factor else "no"


def test_parameters_of_the_sample_are_not_shown_to_the_model() -> None:
    assert list(parameters(guess)["properties"]) == ["number"]


def test_parameters_of_the_sample_come_from_its_arguments() -> None:
    async def test() -> None:
        assert await answer(guess, '{"number": 7}', secret=7) == "yes"
        assert await answer(guess, '{"number": 7}', secret=7, factor=2) == "no"
        told = await answer(guess, '{"number": 7, "secret": 7}', secret=8)
        assert "'secret' was unexpected" in told, "the model cannot overrule the sample"

    run(test)


def test_arguments_the_function_does_not_take_are_refused_before_it_runs() -> None:
    async def test() -> None:
        with pytest.raises(ToolError, match="tool 'guess': create: tool_arguments: 'secret' is missing"):
            await answer(guess)
        with pytest.raises(ToolError, match=r"got 'sceret', expected only \['secret', 'factor'\]"):
            await answer(guess, secret=1, sceret=2)

    run(test)


def test_what_a_sample_gives_arrives_as_what_the_annotation_says_or_not_at_all() -> None:
    @tool(per_sample=("answer", "since", "limit"))
    def judge(answer: int, since: datetime.date, limit: int = None) -> str:  # type: ignore[assignment]  # noqa: RUF013
        return f"{answer + 1} {since.year} {limit}"

    async def test() -> None:
        assert await answer(judge, "{}", answer=5, since="2030-01-01", limit=None) == "6 2030 None"
        with pytest.raises(
            ToolError, match="create: tool_arguments: answer: got '5': Expected `int`, got `str`"
        ):
            await answer(judge, "{}", answer="5", since="2030-01-01")

    run(test)


def test_per_sample_names_parameters_that_are_there() -> None:
    with pytest.raises(InputError, match="per_sample of tool 'follow': got 'trajectory', expected another"):

        @tool(per_sample=["trajectory"])
        def follow(trajectory: str) -> str:
            return trajectory

    with pytest.raises(InputError, match=r"per_sample of tool 'plain': got 'b', expected one of \['a'\]"):

        @tool(per_sample=["b"])
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
def test_every_style_says_the_same(doc: str) -> None:
    assert read(doc) == ("Finds pages.\n\nOf the whole web.", QUERY)


@pytest.mark.parametrize(
    ("behind", "about"),
    [
        ("The index is rebuilt every night.", "The index is rebuilt every night."),
        ("Tip: use short words.", "Tip: use short words."),
        ("Warning:\n        Slow: very.", "Warning:\n    Slow: very."),
        ("Note:\n        query: is not cached.", ""),
    ],
)
@pytest.mark.parametrize("doc", [GOOGLE, SPHINX])
def test_a_line_at_the_edge_ends_a_section(doc: str, behind: str, about: str) -> None:
    told = f"Finds pages.\n\nOf the whole web.\n\n{about}".rstrip()
    assert read(f"{doc}\n    {behind}\n") == (told, QUERY)


def test_behind_numpys_parameters_a_sentence_belongs_to_no_parameter() -> None:
    doc = NUMPY.partition("    Returns")[0] + "    It is slow, at night.\n    Parameters: see above.\n"
    assert read(doc) == (
        "Finds pages.\n\nOf the whole web.\n\nIt is slow, at night.\nParameters: see above.",
        QUERY,
    )


def test_numpys_parameters_can_share_what_is_said_of_them() -> None:
    doc = """Adds.

    Parameters
    ----------
    a, b : int
        A number.
    """
    assert read(doc) == ("Adds.", {"a": "A number.", "b": "A number."})


def test_what_looks_like_a_section_but_is_none_is_text() -> None:
    doc = """Says:

    :class:`Page` is what it finds.

    Usage
    -----
    Args are named.
    """
    assert read(doc) == (
        "Says:\n\n:class:`Page` is what it finds.\n\nUsage\n-----\nArgs are named.",
        {},
    )
    assert read("") == ("", {})
