"""Reads the scores in the answer of a judge.

The answer is the one JSON value of the text that has exactly the ids that the judge was shown, each once: a
list of objects with `trajectory_id` and `score`, or an object from ids to scores, by itself or under
`scores`, without an id as another key or value. Nobody but the judge knows these ids, so what it quotes is
never an answer: text and JSON without them is ignored, and so is everything before a `</think>`. No such
value, two that differ, other JSON with an id that does not repeat some of its scores, or parts of one that is
no valid JSON, is an error of the whole answer. A score that is no number from 0 to 1 is an error of its
trajectory alone.

    read_scores('Notes [0, 1]. {"scores": [{"trajectory_id": "k7f2qz", "score": 0.5}]}', ["k7f2qz"])

Reading takes time linear in the length of any text.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

MAX_ANSWER_CHARS = 1_000_000
MAX_DEPTH = 64
"""Values nested deeper are not read as JSON."""
_EXPECTED = "expected one JSON object with a score from 0 to 1 for each trajectory"
_ID_KEY, _SCORE_KEY, _SCORES_KEY = "trajectory_id", "score", "scores"
_ENTRY = re.compile(rf"""(?=["'](\w++)["']\s*+:|\{{\s*+(\w++)\s*+:|{_ID_KEY}["']?\s*+:\s*+["']?(\w++))""")
"""The beginning of an entry and its id, with or without quotes. Entries may overlap."""


@dataclass(frozen=True)
class Judgement:
    """What a judge says about one trajectory."""

    score: float | None
    """From 0 to 1; None if the judge gave none."""
    problem: str = ""
    """Why there is no score."""
    trace: str = field(default="", repr=False, compare=False)
    """The traceback of a judge that raised."""


class _AnswerError(Exception):
    """What was got instead of an answer."""


class _Object(tuple[tuple[str, Any], ...]):
    """The fields of a JSON object in order; a key may occur several times."""

    def values_of(self, key: str) -> list[Any]:
        return [value for name, value in self if name == key]


def read_scores(answer: object, ids: Sequence[str]) -> tuple[list[Judgement], str]:
    """Returns what a judge says about the trajectories with these ids, and what is wrong with the answer as a
    whole, if anything. Never raises.

    >>> read_scores('{"scores": [{"trajectory_id": "k7f2qz", "score": 0.8}]} [0, 1]', ["k7f2qz"])
    ([Judgement(score=0.8, problem='')], '')
    """
    try:
        return _read_answer(answer, ids), ""
    except _AnswerError as error:
        problem = f"got {error}, {_EXPECTED}"
        return [Judgement(None, problem)] * len(ids), problem


def _read_answer(answer: object, ids: Sequence[str]) -> list[Judgement]:
    if not isinstance(answer, str):
        raise _AnswerError(type(answer).__name__)
    if len(answer) > MAX_ANSWER_CHARS:
        raise _AnswerError(f"{len(answer):,} characters, more than {MAX_ANSWER_CHARS:,}")
    begin = max(answer.rfind("</think>"), 0)
    spans = [span for span in json_spans(answer) if span[1] > begin]
    if _has_entry_outside(answer, begin, spans, ids):
        raise _AnswerError("parts of an answer outside of valid JSON")
    complete: list[dict[str, Judgement]] = []
    partial: list[dict[str, Judgement]] = []
    """The entries of other JSON with an id; none if it is written in another way."""
    wrong = ""
    any_id = re.compile("|".join(map(re.escape, ids)), re.IGNORECASE)
    for start, end in spans:
        if any_id.search(answer, start, end) is None:
            continue
        value = _decode(answer[start:end])
        entries = _score_entries(value)
        found = {name: read_judgement(scores) for name, scores in entries}
        if wrong_ids := _wrong_ids([name for name, _ in entries], ids):
            partial.append(found)
            wrong = wrong if found.keys().isdisjoint(ids) else wrong_ids
        elif sum(1 for text in _texts(value) if any_id.fullmatch(text)) > len(ids):
            raise _AnswerError("an id in several places of one JSON value")
        else:
            complete.append(found)
    if not complete:
        raise _AnswerError(wrong or repr(answer[-200:]))
    scores = complete[0]
    if any(found != scores for found in complete):
        raise _AnswerError("two different answers for all trajectories")
    for found in partial:
        if not found or not found.keys() <= scores.keys():
            raise _AnswerError("JSON with an id beside the answer")
        if any(scores[name] != one for name, one in found.items()):
            raise _AnswerError("two scores for a trajectory")
    return [scores[name] for name in ids]


def read_judgement(scores: Sequence[Any]) -> Judgement:
    """Returns the only score of a trajectory if it is a number from 0 to 1, else what is wrong with it."""
    if len(scores) != 1:
        return Judgement(None, f"score: got {len(scores)} values, expected one")
    (score,) = scores
    if score is None:
        return Judgement(None, "got no score")
    if isinstance(score, int | float) and not isinstance(score, bool) and 0 <= score <= 1:
        return Judgement(float(score))
    shown = "an object or a list" if isinstance(score, list | tuple) else repr(score)
    return Judgement(None, f"score: got {shown[:100]}, expected a number from 0 to 1")


def _has_entry_outside(answer: str, begin: int, spans: Sequence[tuple[int, int]], ids: Sequence[str]) -> bool:
    """Whether an entry of an id stands outside of every JSON value."""
    ends = (begin, *(end for _, end in spans))
    starts = (*(start for start, _ in spans), len(answer))
    return any(
        match[match.lastindex or 0].lower() in ids
        for end, start in zip(ends, starts, strict=True)
        if end < start
        for match in _ENTRY.finditer(answer, end, start)
    )


def _score_entries(value: Any) -> list[tuple[str, list[Any]]]:
    """Returns the ids of a JSON value with their scores; none if the value is not an answer."""
    if isinstance(value, _Object) and (tables := value.values_of(_SCORES_KEY)):
        value = tables[0] if len(tables) == 1 else None
    if isinstance(value, list) and all(isinstance(item, _Object) for item in value):
        names = [item.values_of(_ID_KEY) for item in value]
        if all(len(ids) == 1 and isinstance(ids[0], str) for ids in names):
            return [(ids[0], item.values_of(_SCORE_KEY)) for ids, item in zip(names, value, strict=True)]
    if isinstance(value, _Object):
        return [
            (name, score.values_of(_SCORE_KEY) if isinstance(score, _Object) else [score])
            for name, score in value
        ]
    return []


def _texts(value: Any) -> Iterator[str]:
    """Yields the keys and the strings of a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, _Object):
        for name, field in value:
            yield name
            yield from _texts(field)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)


def _wrong_ids(names: Sequence[str], ids: Sequence[str]) -> str:
    """Returns how many ids are missing or there several times, and which are unknown; empty if none is."""
    counts = Counter(names)
    missing = sum(name not in counts for name in ids)
    repeated = sum(counts[name] > 1 for name in ids)
    unknown = sorted(set(counts) - set(ids))
    problems = (
        f"no score for {missing} of {len(ids)} trajectories" if missing else "",
        f"several scores for {repeated} of {len(ids)} trajectories" if repeated else "",
        f"the unknown trajectory {', '.join(unknown)[:100]}" if unknown else "",
    )
    return "; ".join(filter(None, problems))


# -- JSON in a text ------------------------------------------------------------------------------------

_BRACKET = re.compile(r"[\[{]")
_SPACE = re.compile(r"[ \t\n\r]*+")
_STRING = re.compile(r'"(?:[^"\\\x00-\x1f]++|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*+"')
_SCALAR = re.compile(r"-?(?:0|[1-9]\d*+)(?:\.\d++)?(?:[eE][+-]?\d++)?|true|false|null|NaN|-?Infinity")
_EXACT_DIGITS = 18


def find_json(text: str) -> Iterator[Any]:
    """Yields the JSON objects and lists of a text, without those that are parts of another one. An object is
    a tuple of its fields."""
    return (_decode(text[start:end]) for start, end in json_spans(text))


def json_spans(text: str) -> Iterator[tuple[int, int]]:
    """Yields where the JSON objects and lists of a text begin and end.

    Brackets are read from the last to the first: a value inside another is known when the outer one is read,
    so that each part of the text is read a bounded number of times.
    """
    brackets = [match.start() for match in _BRACKET.finditer(text)]
    ends: dict[int, tuple[int, int]] = {}
    """For each bracket that begins a JSON value: the end of the value and the depth of its nesting."""
    for position in reversed(brackets):
        value = _end_of_container(text, position, ends)
        if value is not None:
            ends[position] = value
    index = 0
    while index < len(brackets):
        position = brackets[index]
        index += 1
        if position in ends:
            end, _ = ends[position]
            index = bisect_left(brackets, end)
            yield position, end


def _decode(text: str) -> Any:
    return json.loads(text, object_pairs_hook=_Object, parse_int=_read_int)


def _read_int(digits: str) -> float:
    return int(digits) if len(digits) <= _EXACT_DIGITS else float(digits)


def _end_of_container(text: str, position: int, ends: dict[int, tuple[int, int]]) -> tuple[int, int] | None:
    """Returns the end and the depth of the object or list at a position; None if it is no valid JSON."""
    is_object = text[position] == "{"
    close = "}" if is_object else "]"
    position, depth = _after_space(text, position + 1), 1
    if text.startswith(close, position):
        return position + 1, depth
    while True:
        if is_object:
            key = _STRING.match(text, position)
            if key is None:
                return None
            position = _after_space(text, key.end())
            if not text.startswith(":", position):
                return None
            position = _after_space(text, position + 1)
        if position in ends:
            position, inner = ends[position]
            depth = max(depth, inner + 1)
            if depth > MAX_DEPTH:
                return None
        else:
            scalar = _STRING.match(text, position) or _SCALAR.match(text, position)
            if scalar is None:
                return None
            position = scalar.end()
        position = _after_space(text, position)
        if text.startswith(close, position):
            return position + 1, depth
        if not text.startswith(",", position):
            return None
        position = _after_space(text, position + 1)


def _after_space(text: str, position: int) -> int:
    match = _SPACE.match(text, position)
    return position if match is None else match.end()
