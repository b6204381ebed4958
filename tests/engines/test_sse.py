from __future__ import annotations

import json
from itertools import pairwise

from hypothesis import example, given
from hypothesis import strategies as st

from branchline.engines.sse import SseParser

DATA = st.text(st.characters(codec="utf-8", exclude_characters="\r\n"), min_size=1).map(str.encode)
COMMENTS = st.sampled_from([b": keep-alive", b":", b"event: ping", b"id: 7", b"retry: 100"])


def parse(body: bytes, cuts: list[int]) -> list[bytes]:
    """The events of a body that arrives in pieces."""
    reader = SseParser()
    places = [0, *sorted(cut % (len(body) + 1) for cut in cuts), len(body)]
    events = []
    for start, end in pairwise(places):
        events += reader.feed(body[start:end])
    return events + reader.flush()


@given(
    events=st.lists(DATA.filter(lambda data: data != b"[DONE]" and not data.startswith(b" "))),
    comments=st.lists(COMMENTS, max_size=3),
    newline=st.sampled_from([b"\n", b"\r\n"]),
    space=st.sampled_from([b"", b" "]),
    cuts=st.lists(st.integers(0, 10_000), max_size=30),
)
def test_any_cut_of_the_bytes_gives_the_same_events(
    events: list[bytes], comments: list[bytes], newline: bytes, space: bytes, cuts: list[int]
) -> None:
    body = b""
    for event in events:
        body += b"".join(comment + newline for comment in comments)
        body += b"data:" + space + event + newline * 2
    body += b"data: [DONE]" + newline * 2
    assert parse(body, cuts) == events
    assert parse(body, list(range(len(body)))) == events, "a byte at a time"


def test_events_of_several_lines_are_joined() -> None:
    assert parse(b"data: a\ndata:b\ndata\ndata:\n\ndata: c\n\n", []) == [b"a\nb\n", b"c"]


def test_an_event_without_its_empty_line_counts_only_where_the_answer_ends() -> None:
    reader = SseParser()
    assert reader.feed(b"data: 1\n\ndata: 2\n") == [b"1"]
    assert reader.flush() == [b"2"]
    assert reader.flush() == []


def test_what_says_nothing_is_no_event() -> None:
    assert parse(b"\n\n: hello\n\nevent: ping\n\ndata: [DONE]\n\n\r\n", []) == []


OBJECTS = st.dictionaries(st.text(max_size=3), st.none() | st.text(max_size=3), max_size=2)
LINES = OBJECTS.map(lambda one: b"data: " + json.dumps(one).encode()) | st.sampled_from(
    [
        b"data: {}",
        b"data:{}",
        b"data:  {}",
        b"data: ",
        b"data: [DONE]",
        b"data: {\r}",
        b": {}",
        b"",
        b"}",
        b"data: {",
        b"data: }",
    ]
)


@example([[(b"data: {}", b"\n\n"), (b"data: [DONE]", b"\n\n"), (b"data: {}", b"\n\n")]])
@example([[(b"data: {}\r", b"\n\n"), (b"data: {}", b"\n\n")]])
@example([[(b"data: {}", b"\n"), (b"data: {}", b"\n\n")]])
@example([[(b"data: {", b"\n\n"), (b"data: }", b"\n\n")]])
@given(
    pieces=st.lists(
        st.lists(st.tuples(LINES, st.sampled_from([b"\n\n", b"\n\n", b"\n", b"\r\n\r\n"])), max_size=4),
        max_size=5,
    )
)
def test_events_that_come_whole_are_read_as_if_they_came_a_byte_at_a_time(
    pieces: list[list[tuple[bytes, bytes]]],
) -> None:
    bodies = [b"".join(line + end for line, end in piece) for piece in pieces]
    whole, bytewise = SseParser(), SseParser()
    for body in bodies:
        assert whole.feed(body) == [
            event for place in range(len(body)) for event in bytewise.feed(body[place : place + 1])
        ]
    assert whole.flush() == bytewise.flush()
