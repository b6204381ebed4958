"""An echo matches with a named equivalence for every change, and an edit never matches."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from branchline.core.call import Equivalence, Request
from branchline.core.message import Message, ToolCall
from branchline.core.reader import read_message
from branchline.tree.match import match_echo, order_tool_results, pair_tool_calls

E = Equivalence


def assistant_message(content: Any = "", **fields: Any) -> Message:
    return read_message({"role": "assistant", "content": content, **fields})


def tool_call_json(name: str = "f", arguments: Any = "{}", id: str = "c1") -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def assistant_calling(*calls: dict[str, Any], **fields: Any) -> Message:
    return assistant_message(tool_calls=list(calls), **fields)


def with_arguments(arguments: Any) -> Message:
    return assistant_calling(tool_call_json(arguments=arguments))


# -- single changes ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sampled", "shown", "reason"),
    [
        pytest.param(
            assistant_message(""), assistant_message(None), E.EMPTY_CONTENT, id="null for an empty text"
        ),
        pytest.param(
            assistant_message(""), read_message({"role": "assistant"}), E.EMPTY_CONTENT, id="absent for empty"
        ),
        pytest.param(assistant_message(None), assistant_message(""), E.EMPTY_CONTENT, id="empty for null"),
        pytest.param(
            assistant_message(None),
            read_message({"role": "assistant"}),
            E.EMPTY_CONTENT,
            id="absent for null",
        ),
        pytest.param(
            assistant_message("hi"),
            assistant_message([{"type": "text", "text": "hi"}]),
            E.PART_LIST,
            id="a part",
        ),
        pytest.param(
            assistant_message("hi"),
            assistant_message(["h", {"type": "text", "text": "i"}]),
            E.PART_LIST,
            id="two parts",
        ),
        pytest.param(assistant_message(""), assistant_message([]), E.PART_LIST, id="no parts"),
        pytest.param(
            assistant_message([{"type": "text", "text": "hi"}]),
            assistant_message("hi"),
            E.PART_LIST,
            id="a string",
        ),
        pytest.param(
            assistant_message("hi"), assistant_message("hi", tool_calls=None), E.EMPTY_CALLS, id="null calls"
        ),
        pytest.param(
            assistant_message("hi"), assistant_message("hi", tool_calls=[]), E.EMPTY_CALLS, id="empty calls"
        ),
        pytest.param(
            assistant_message("hi", tool_calls=None),
            assistant_message("hi", tool_calls=[]),
            E.EMPTY_CALLS,
            id="no calls",
        ),
        pytest.param(
            assistant_calling(tool_call_json(id="c1")),
            assistant_calling(tool_call_json(id="x")),
            E.RENAMED_IDS,
            id="another id",
        ),
        pytest.param(
            assistant_calling(tool_call_json(id="c1")),
            assistant_calling(tool_call_json(id="")),
            E.RENAMED_IDS,
            id="no id",
        ),
        pytest.param(
            assistant_calling(tool_call_json(id="c1")),
            assistant_message(function_call={"name": "f", "arguments": "{}"}),
            E.RENAMED_IDS,
            id="legacy",
        ),
        pytest.param(
            with_arguments('{"a": 1, "b": 2}'),
            with_arguments('{"b": 2, "a": 1}'),
            E.ARGUMENTS_RESERIALISED,
            id="other key order",
        ),
        pytest.param(
            with_arguments('{"a": 1}'), with_arguments('{"a":1}'), E.ARGUMENTS_RESERIALISED, id="spacing"
        ),
        pytest.param(
            with_arguments('{"a": "é"}'),
            with_arguments('{"a": "\\u00e9"}'),
            E.ARGUMENTS_RESERIALISED,
            id="escapes",
        ),
        pytest.param(
            with_arguments('{"a": 1.0}'),
            with_arguments('{"a": 1}'),
            E.ARGUMENTS_RESERIALISED,
            id="number spelling",
        ),
        pytest.param(
            with_arguments('{"a": 1}'),
            with_arguments({"a": 1}),
            E.ARGUMENTS_RESERIALISED,
            id="an object",
        ),
        pytest.param(
            with_arguments('{"a": false}'),
            with_arguments('{"a": False}'),
            E.PYTHON_LITERALS,
            id="booleans rendered again",
        ),
        pytest.param(
            with_arguments("{'a': None}"),
            with_arguments('{"a": null}'),
            E.PYTHON_LITERALS,
            id="a sampled literal made JSON",
        ),
        pytest.param(with_arguments("{}"), with_arguments(""), E.EMPTY_ARGUMENTS, id="nothing for {}"),
        pytest.param(with_arguments(""), with_arguments({}), E.EMPTY_ARGUMENTS, id="{} for nothing"),
        pytest.param(
            assistant_calling(tool_call_json("f", id="c1"), tool_call_json("g", id="c2")),
            assistant_calling(tool_call_json("g", id="c2"), tool_call_json("f", id="c1")),
            E.REORDERED_CALLS,
            id="calls in another order",
        ),
        pytest.param(
            assistant_calling(tool_call_json(id="c1"), tool_call_json(id="c2")),
            assistant_calling(tool_call_json(id="c2"), tool_call_json(id="c1")),
            E.REORDERED_CALLS,
            id="equal calls in another order",
        ),
        pytest.param(
            assistant_message("hi \n"), assistant_message("hi"), E.TRIMMED_WHITESPACE, id="text trimmed"
        ),
        pytest.param(
            assistant_message("\n\nhi"),
            assistant_message("hi"),
            E.TRIMMED_WHITESPACE,
            id="text trimmed in front",
        ),
        pytest.param(
            assistant_message("\n\n"),
            assistant_message(""),
            E.TRIMMED_WHITESPACE,
            id="nothing but whitespace lost",
        ),
        pytest.param(
            assistant_message("hi", reasoning="hm\n"),
            assistant_message("hi", reasoning="hm"),
            E.TRIMMED_WHITESPACE,
            id="reasoning trimmed",
        ),
        pytest.param(
            assistant_message("hi", reasoning="\n\n"),
            assistant_message("hi"),
            E.TRIMMED_WHITESPACE,
            id="blank reasoning lost",
        ),
        pytest.param(
            assistant_message(" hi", reasoning=" hm"),
            assistant_message("hi", reasoning="hm"),
            E.TRIMMED_WHITESPACE,
            id="both trimmed",
        ),
        pytest.param(
            assistant_message("hi", reasoning="hm"),
            assistant_message("hi"),
            E.DROPPED_REASONING,
            id="reasoning dropped",
        ),
        pytest.param(
            assistant_message("hi", reasoning="hm"),
            assistant_message("hi", reasoning=" "),
            E.DROPPED_REASONING,
            id="reasoning blanked",
        ),
        pytest.param(
            assistant_message("hi"), assistant_message("hi", name="ann"), Equivalence.NAMED, id="a name"
        ),
    ],
)
def test_a_single_change_has_a_named_equivalence(
    sampled: Message, shown: Message, reason: Equivalence
) -> None:
    assert match_echo(sampled, shown) == (reason,)


@pytest.mark.parametrize(
    ("sampled", "shown"),
    [
        pytest.param(assistant_message("hi"), assistant_message("hi"), id="text"),
        pytest.param(
            assistant_message("hi", reasoning="hm"),
            assistant_message("hi", reasoning_content="hm"),
            id="name of reasoning",
        ),
        pytest.param(
            assistant_message("hi", id="resp_1"),
            assistant_message("hi", id="resp_2"),
            id="id of the response",
        ),
        pytest.param(assistant_calling(tool_call_json()), assistant_calling(tool_call_json()), id="call"),
        pytest.param(
            assistant_calling(tool_call_json(id="")),
            assistant_calling(tool_call_json(id="c1")),
            id="an id where none was sampled",
        ),
    ],
)
def test_an_identical_echo_needs_no_equivalence(sampled: Message, shown: Message) -> None:
    assert match_echo(sampled, shown) == ()


def test_an_empty_tool_list_is_a_named_equivalence() -> None:
    body = {"messages": [{"role": "user", "content": "hi"}]}
    absent, null = Request.read(body), Request.read({**body, "tools": None})
    empty = Request.read({**body, "tools": []})
    assert empty.equivalences == (E.EMPTY_TOOLS,)
    assert absent.equivalences == null.equivalences == ()
    assert empty.prompt_config_digest == absent.prompt_config_digest == null.prompt_config_digest


# -- several changes ---------------------------------------------------------------------------------


def test_several_changes_are_named_one_by_one() -> None:
    sampled = assistant_calling(
        tool_call_json("f", '{"a": 1, "b": 2}', "c1"),
        tool_call_json("g", '{"on": true}', "c2"),
        tool_call_json("h", "{}", "c3"),
        content="\n\n",
        reasoning="hm",
    )
    shown = assistant_calling(
        tool_call_json("g", "{'on': True}", "x2"),
        tool_call_json("f", '{"b":2,"a":1}', "x1"),
        tool_call_json("h", "", "x3"),
        content=None,
    )
    assert match_echo(sampled, shown) == (
        E.TRIMMED_WHITESPACE,
        E.EMPTY_CONTENT,
        E.DROPPED_REASONING,
        E.REORDERED_CALLS,
        E.RENAMED_IDS,
        E.ARGUMENTS_RESERIALISED,
        E.PYTHON_LITERALS,
        E.EMPTY_ARGUMENTS,
    )


def test_a_repeated_change_is_named_once() -> None:
    sampled = assistant_calling(tool_call_json("f", '{"a": 1}', "c1"), tool_call_json("g", '{"a": 1}', "c2"))
    shown = assistant_calling(tool_call_json("f", '{"a":1}', "x1"), tool_call_json("g", '{"a":1}', "x2"))
    assert match_echo(sampled, shown) == (E.RENAMED_IDS, E.ARGUMENTS_RESERIALISED)


# -- edits -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sampled", "shown"),
    [
        pytest.param(assistant_message("hi"), assistant_message("ho"), id="changed text"),
        pytest.param(assistant_message("hi"), assistant_message("hi there"), id="added text"),
        pytest.param(assistant_message("a b"), assistant_message("a  b"), id="whitespace inside"),
        pytest.param(assistant_message("hi"), assistant_message(""), id="dropped text"),
        pytest.param(
            assistant_message("hi", reasoning="hm"),
            assistant_message("hi", reasoning="ha"),
            id="changed reasoning",
        ),
        pytest.param(
            assistant_message("hi", reasoning="hm"),
            assistant_message("hi", reasoning="hm hm"),
            id="added reasoning",
        ),
        pytest.param(
            assistant_message("hi"), assistant_message("hi", reasoning="hm"), id="reasoning from nowhere"
        ),
        pytest.param(assistant_message("hi"), assistant_message("hi", refusal="no"), id="a refusal"),
        pytest.param(
            assistant_message("hi"), read_message({"role": "user", "content": "hi"}), id="another role"
        ),
        pytest.param(
            assistant_calling(tool_call_json("f")), assistant_calling(tool_call_json("g")), id="another tool"
        ),
        pytest.param(assistant_calling(tool_call_json()), assistant_message(""), id="a call dropped"),
        pytest.param(
            assistant_calling(tool_call_json()),
            assistant_calling(tool_call_json(), tool_call_json()),
            id="a call added",
        ),
        pytest.param(
            assistant_calling(tool_call_json("f"), tool_call_json("g")),
            assistant_calling(tool_call_json("f"), tool_call_json("f")),
            id="a call replaced",
        ),
        pytest.param(with_arguments('{"a": 1}'), with_arguments('{"a": 2}'), id="another argument"),
        pytest.param(with_arguments('{"a": 1}'), with_arguments('{"a": true}'), id="1 to true"),
        pytest.param(with_arguments('{"a": 1}'), with_arguments('{"a": "1"}'), id='1 to "1"'),
        pytest.param(with_arguments('{"a": null}'), with_arguments("{}"), id="a null dropped"),
        pytest.param(with_arguments("[1, 2]"), with_arguments("[2, 1]"), id="a list reordered"),
        pytest.param(with_arguments("ls -l"), with_arguments("ls  -l"), id="free text"),
        pytest.param(
            assistant_calling(tool_call_json("f", "[1]"), tool_call_json("g", "[2]")),
            assistant_calling(tool_call_json("f", "[2]"), tool_call_json("g", "[1]")),
            id="swapped",
        ),
        pytest.param(
            assistant_message("see"),
            assistant_message(["see", {"type": "image_url", "image_url": "https://a.example/1"}]),
            id="an image",
        ),
    ],
)
def test_an_edit_does_not_match(sampled: Message, shown: Message) -> None:
    assert match_echo(sampled, shown) is None
    if not (shown.reasoning_content and not sampled.reasoning_content):
        assert match_echo(shown, sampled) is None


# -- the order of calls ------------------------------------------------------------------------------


def tool_calls(*specs: tuple[str, str]) -> tuple[ToolCall, ...]:
    return tuple(ToolCall(name, "{}", id=id) for name, id in specs)


@pytest.mark.parametrize(
    ("sampled", "shown", "order"),
    [
        ((), (), []),
        ((("a", "1"), ("b", "2")), (("a", "1"), ("b", "2")), [0, 1]),
        ((("a", "1"), ("b", "2"), ("c", "3")), (("c", "3"), ("a", "1"), ("b", "2")), [1, 2, 0]),
        ((("a", "1"), ("b", "2")), (("b", "x"), ("a", "y")), [1, 0]),
        # Equal calls pair by their ids,
        ((("a", "1"), ("a", "2")), (("a", "2"), ("a", "1")), [1, 0]),
        # then in order,
        ((("a", "1"), ("a", "2")), (("a", "x"), ("a", "y")), [0, 1]),
        ((("a", ""), ("a", "")), (("a", ""), ("a", "")), [0, 1]),
        # and equal ids pair before equal calls.
        ((("a", "1"), ("a", "2")), (("a", "2"), ("a", "x")), [1, 0]),
        ((("a", "1"), ("a", "2"), ("a", "3")), (("a", "x"), ("a", "1"), ("a", "y")), [1, 0, 2]),
        # Calls with equal ids but different names do not pair.
        ((("a", "1"), ("b", "2")), (("b", "1"), ("a", "2")), [1, 0]),
        # A call without an echo gets -1.
        ((("a", "1"), ("b", "2")), (("b", "2"),), [-1, 0]),
        ((("a", "1"),), (), [-1]),
    ],
)
def test_sampled_calls_pair_with_their_echoes(
    sampled: Sequence[tuple[str, str]], shown: Sequence[tuple[str, str]], order: list[int]
) -> None:
    assert pair_tool_calls(tool_calls(*sampled), tool_calls(*shown)) == order


# -- the order of results ----------------------------------------------------------------------------


def reordered(sampled: str, shown: str, results: str) -> tuple[str, bool]:
    """Orders results `text:tool_call_id` of calls `name:id`; returns the texts in their new order."""

    def message(row: str) -> Message:
        pairs = [entry.partition(":")[::2] for entry in row.split()]
        return Message("assistant", tool_calls=tool_calls(*pairs))

    messages = [
        Message("tool", text, tool_call_id=answers)
        for text, answers in (entry.split(":") for entry in results.split())
    ]
    ordered, moved = order_tool_results(message(sampled), message(shown), messages)
    return " ".join(result.content for result in ordered), moved


@pytest.mark.parametrize(
    ("sampled", "shown", "results", "ordered"),
    [
        pytest.param("a:1 b:2", "a:1 b:2", "A:1 B:2", "A B", id="in order"),
        pytest.param("a:1 b:2", "a:1 b:2", "B:2 A:1", "A B", id="results reordered"),
        pytest.param("a:1 b:2", "b:2 a:1", "B:2 A:1", "A B", id="calls and results reordered"),
        pytest.param("a:1 b:2", "b:2 a:1", "A:1 B:2", "A B", id="calls reordered, results not"),
        pytest.param("a:1 b:2", "b:x a:y", "B:x A:y", "A B", id="renamed and reordered"),
        pytest.param("a:1 b:2", "a:x b:y", "B:y A:x", "A B", id="renamed, results reordered"),
        pytest.param("a:1 b:2", "b:1 a:2", "B:1 A:2", "A B", id="renamed to each other's ids"),
        pytest.param("a:1 a:2", "a:2 a:1", "B:2 A:1", "A B", id="equal calls by id"),
        pytest.param("a:1 a:2", "a:x a:y", "B:y A:x", "A B", id="equal calls, renamed"),
        pytest.param("a: b:", "b: a:", "B: A:", "A B", id="no ids, all reordered"),
        pytest.param("a: b:", "a: b:", "A: B:", "A B", id="no ids"),
        pytest.param("a:1 b:2", "b: a:", "B: A:", "A B", id="ids left out"),
        pytest.param("a:1 b:2", "b: a:", "A:1 B:2", "A B", id="ids left out on calls only"),
        pytest.param("a:1 b:2", "b:2 a:1", "B: A:", "A B", id="ids left out on results only"),
        pytest.param("a:1 b:2", "b:2 a:1", "B:2 A:", "A B", id="one id left out"),
        pytest.param("a:1 b:2", "b:x a:y", "B:? A:?", "A B", id="unknown ids go by position"),
        pytest.param("a:1 b:2", "b:x a:x", "B:x A:x", "A B", id="one id for all goes by position"),
        pytest.param("a:x b:2", "b:x a:x", "B:x A:x", "A B", id="one id for all, one of ours"),
        pytest.param("a:1 b:2 c:3", "a:1 b:2 c:3", "C:3 A:1", "A C", id="two of three"),
        pytest.param("a:1 b:2 c:3", "c:3 b:2 a:1", "C: B:", "B C", id="two of three by position"),
        pytest.param("a:1 b:2", "b:2 a:1", "B:2", "B", id="one of two"),
        pytest.param("a:1", "a:1", "A:1", "A", id="one of one"),
        pytest.param("a:1 b:2", "a:1 b:2", "B1:2 B2:2 A:1", "A B1 B2", id="a call answered twice"),
    ],
)
def test_results_are_put_in_the_order_of_the_sampled_calls(
    sampled: str, shown: str, results: str, ordered: str
) -> None:
    came = " ".join(entry.split(":")[0] for entry in results.split())
    assert reordered(sampled, shown, results) == (ordered, ordered != came)


@pytest.mark.parametrize(
    ("sampled", "shown", "results"),
    [
        pytest.param("a:1 b:2", "b:2 a:1", "B: A: X:", id="more results than calls"),
        pytest.param("a:1 b:2", "a:1 b:2", "B:2 A:1 X:9", id="a stray result"),
        pytest.param("a:1 b:2", "b:2 a:1", "A:1 X:", id="a position that is taken"),
        pytest.param("a:1 b:2", "a:1 c:2", "B:2 A:1", id="calls that are no echo"),
        pytest.param("a:1 b:2", "a:1", "B:2 A:1", id="a call that is gone"),
    ],
)
def test_ambiguous_results_do_not_move(sampled: str, shown: str, results: str) -> None:
    came = " ".join(entry.split(":")[0] for entry in results.split())
    assert reordered(sampled, shown, results) == (came, False)


# -- properties: client changes have names, all other changes are edits -----------------------------

TEXTS = ["", "hi", " hi\n", "\n\n", "a b"]
REASONING = ["", "hm", "\nhm ", "\n"]
ARGUMENTS = ['{"a": 1, "b": [true, null]}', '{"a": 2.0}', "{}", '{"c": "é\\n"}', '["x", {"y": false}]', "ls"]

wire_calls = st.lists(
    st.tuples(st.sampled_from("fg"), st.sampled_from(ARGUMENTS)), max_size=4, unique=True
).map(lambda made: [tool_call_json(name, text, f"c{position}") for position, (name, text) in enumerate(made)])


@st.composite
def assistant_bodies(draw: st.DrawFn) -> dict[str, Any]:
    """Draws an assistant message in wire form."""
    raw: dict[str, Any] = {"role": "assistant", "content": draw(st.sampled_from(TEXTS))}
    reasoning, made = draw(st.sampled_from(REASONING)), draw(wire_calls)
    if reasoning:
        raw["reasoning_content"] = reasoning
    if made:
        raw["tool_calls"] = made
    return raw


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def rewrite_arguments(
    draw: Callable[[st.SearchStrategy[Any]], Any], body: dict[str, Any]
) -> Equivalence | None:
    """Rewrites the arguments of a call; returns the equivalence, or None if the text is unchanged."""
    text = body["arguments"]
    if not _is_json(text):
        return None
    value = json.loads(text)
    ways: list[tuple[str, Equivalence]] = [
        (json.dumps(value, indent=2), E.ARGUMENTS_RESERIALISED),
        (json.dumps(value, separators=(",", ":"), ensure_ascii=False), E.ARGUMENTS_RESERIALISED),
    ]
    if isinstance(value, dict):
        ways.append((json.dumps(dict(reversed(value.items()))), E.ARGUMENTS_RESERIALISED))
    if not _is_json(repr(value)):
        ways.append((repr(value), E.PYTHON_LITERALS))
    if value == {}:
        ways.append(("", E.EMPTY_ARGUMENTS))
    body["arguments"], reason = draw(st.sampled_from(ways))
    return reason if body["arguments"] != text else None


def mutate(draw: Callable[[st.SearchStrategy[Any]], Any], raw: dict[str, Any]) -> set[Equivalence]:
    """Changes a message as clients do; returns the equivalences."""
    done: set[Equivalence] = set()
    text, reasoning = raw["content"], raw.get("reasoning_content", "")
    if text != text.strip() and draw(st.booleans()):
        raw["content"] = text.strip()
        done.add(E.TRIMMED_WHITESPACE)
    fate = draw(st.sampled_from(["kept", "trimmed", "dropped"]))
    if fate == "trimmed" and reasoning != reasoning.strip():
        raw["reasoning_content"] = reasoning.strip()
        done.add(E.TRIMMED_WHITESPACE)
    elif fate == "dropped" and reasoning:
        del raw["reasoning_content"]
        done.add(E.DROPPED_REASONING if reasoning.strip() else E.TRIMMED_WHITESPACE)
    content = draw(st.sampled_from(["as it is", "null", "absent", "parts"]))
    if content == "parts":
        cut = draw(st.integers(0, len(raw["content"])))
        raw["content"] = [{"type": "text", "text": raw["content"][:cut]}, raw["content"][cut:]]
        done.add(E.PART_LIST)
    elif content != "as it is" and not raw["content"]:
        raw["content"] = None
        if content == "absent":
            del raw["content"]
        done.add(E.EMPTY_CONTENT)
    made = raw.get("tool_calls", [])
    if not made and draw(st.booleans()):
        raw["tool_calls"] = draw(st.sampled_from([None, []]))
        done.add(E.EMPTY_CALLS)
    for entry in made:
        if draw(st.booleans()):
            entry["id"] = draw(st.sampled_from(["", "x" + entry["id"]]))
            done.add(E.RENAMED_IDS)
        reason = rewrite_arguments(draw, entry["function"]) if draw(st.booleans()) else None
        if reason:
            done.add(reason)
    if made:
        order = draw(st.permutations(range(len(made))))
        raw["tool_calls"] = [made[position] for position in order]
        if list(order) != sorted(order):
            done.add(E.REORDERED_CALLS)
    return done


@settings(max_examples=300)
@given(assistant_bodies(), st.data())
def test_client_changes_match_with_their_equivalences(raw: dict[str, Any], data: st.DataObject) -> None:
    sampled = read_message(raw)
    altered = json.loads(json.dumps(raw))
    done = mutate(data.draw, altered)
    used = match_echo(sampled, read_message(altered))
    assert used is not None
    assert set(used) == done
    assert len(used) == len(done)


def _edit_call(change: Callable[[dict[str, Any]], None]) -> Callable[[dict[str, Any]], bool]:
    def edit(raw: dict[str, Any]) -> bool:
        if not raw.get("tool_calls"):
            return False
        change(raw["tool_calls"][-1]["function"])
        return True

    return edit


def _set(name: str, value: Any) -> Callable[[dict[str, Any]], bool]:
    def edit(raw: dict[str, Any]) -> bool:
        raw[name] = value
        return True

    return edit


def _add_text(raw: dict[str, Any]) -> bool:
    content = raw.get("content") or ""
    raw["content"] = [*content, "!"] if isinstance(content, list) else content + "!"
    return True


def _drop_call(raw: dict[str, Any]) -> bool:
    return bool(raw.get("tool_calls")) and bool(raw["tool_calls"].pop())


EDITS: dict[str, Callable[[dict[str, Any]], bool]] = {
    "text added": _add_text,
    "reasoning changed": _set("reasoning_content", "another thought"),
    "refusal": _set("refusal", "no"),
    "role": _set("role", "user"),
    "another call": _set("tool_calls", [tool_call_json("z")]),
    "call dropped": _drop_call,
    "another tool": _edit_call(lambda body: body.update(name="z")),
    "other arguments": _edit_call(lambda body: body.update(arguments='{"a": true}')),
    "no arguments": _edit_call(lambda body: body.update(arguments="null")),
}


@settings(max_examples=300)
@given(assistant_bodies(), st.sampled_from(sorted(EDITS)), st.data())
def test_an_edit_among_client_changes_does_not_match(
    raw: dict[str, Any], edit: str, data: st.DataObject
) -> None:
    altered = json.loads(json.dumps(raw))
    mutate(data.draw, altered)
    assume(EDITS[edit](altered))
    assert match_echo(read_message(raw), read_message(altered)) is None


@given(assistant_bodies(), assistant_bodies())
def test_a_message_matches_itself_and_no_other(raw: dict[str, Any], other: dict[str, Any]) -> None:
    message, stranger = read_message(raw), read_message(other)
    assert match_echo(message, message) == ()
    assert match_echo(message, read_message(raw)) == ()
    if message.key != stranger.key:
        assert match_echo(message, stranger) is None


@given(
    st.lists(st.sampled_from("ab"), min_size=1, max_size=5),
    st.booleans(),
    st.data(),
)
def test_reordered_calls_and_results_are_restored(
    names: list[str], renamed: bool, data: st.DataObject
) -> None:
    sampled = Message(
        "assistant", tool_calls=tool_calls(*((name, str(position)) for position, name in enumerate(names)))
    )
    by_position = data.draw(st.permutations(range(len(names))))
    shown = Message(
        "assistant",
        tool_calls=tuple(
            ToolCall(names[position], "{ }", id=f"{position}{'x' * renamed}") for position in by_position
        ),
    )
    results = [
        Message("tool", str(position), tool_call_id=f"{position}{'x' * renamed}")
        for position in data.draw(st.permutations(range(len(names))))
    ]
    ordered, moved = order_tool_results(sampled, shown, results)
    assert moved == (list(ordered) != results)
    # Renamed calls with equal names are distinguished only by their order.
    expected = sorted(range(len(names)))
    if renamed:
        turns = {name: [position for position in by_position if names[position] == name] for name in "ab"}
        expected = [turns[name].pop(0) for name in names]
    assert [result.content for result in ordered] == [str(position) for position in expected]


calls_with_ids = st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from(["", "1", "2"])), max_size=3)


@given(calls_with_ids, calls_with_ids, st.lists(st.sampled_from(["", "1", "2", "9"]), max_size=4))
def test_ordering_keeps_every_result(
    sampled: list[tuple[str, str]], shown: list[tuple[str, str]], ids: list[str]
) -> None:
    results = [Message("tool", str(position), tool_call_id=id) for position, id in enumerate(ids)]
    ordered, moved = order_tool_results(
        Message("assistant", tool_calls=tool_calls(*sampled)),
        Message("assistant", tool_calls=tool_calls(*shown)),
        results,
    )
    assert sorted(result.content for result in ordered) == [result.content for result in results]
    assert moved == (list(ordered) != results)


@given(calls_with_ids, calls_with_ids)
def test_only_equal_calls_pair_and_only_once(
    sampled: list[tuple[str, str]], shown: list[tuple[str, str]]
) -> None:
    order = pair_tool_calls(tool_calls(*sampled), tool_calls(*shown))
    taken = [position for position in order if position >= 0]
    assert len(order) == len(sampled)
    assert len(set(taken)) == len(taken)
    assert all(sampled[rank][0] == shown[position][0] for rank, position in enumerate(order) if position >= 0)
