"""Reads the scores in the answer of a judge.

The answer is the one JSON value of the text that has exactly the known ids, each once: a list of objects with
`trajectory_id` and `score`, or an object from ids to scores, by itself or under `scores`. Text and other JSON
around it are ignored, and so is everything before a `</think>`. No such value, two that differ, one beside
another that scores a trajectory otherwise or cannot be read, or parts of one that is no valid JSON, is an
error of the whole answer: what a broken answer quotes is not read.
A score that is no number from 0 to 1 is an error of its trajectory alone.

    read_scores('Notes [0, 1]. {"scores": [{"trajectory_id": "1", "score": 0.5}]}', 1)

Reading takes time linear in the length of any text.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

MAX_ANSWER_CHARS = 1_000_000
MAX_DEPTH = 64
"""Values nested deeper are not read as JSON."""
_EXPECTED = "expected one JSON object with a score from 0 to 1 for each trajectory"
_ID_KEY, _SCORE_KEY, _SCORES_KEY = "trajectory_id", "score", "scores"
_KEYS = r"(?:trajectory_id|scores?|\d{1,6})"
_ANSWER_KEY = re.compile(rf"""(?:["']{_KEYS}["']|\{{\s*+{_KEYS})\s*+:""")


@dataclass(frozen=True)
class Judgement:
    """What a judge says about one trajectory."""

    score: float | None
    """From 0 to 1; None if the judge gave none."""
    problem: str = ""
    """Why there is no score."""


class _Object(tuple[tuple[str, Any], ...]):
    """The fields of a JSON object in order; a key may occur several times."""

    def values_of(self, key: str) -> list[Any]:
        return [value for name, value in self if name == key]


def read_scores(answer: object, count: int) -> tuple[list[Judgement], str]:
    """Returns what a judge says about the trajectories "1" to `count`, and what is wrong with the answer as a
    whole, if anything. Never raises.

    >>> read_scores('{"scores": [{"trajectory_id": "1", "score": 0.8}]} [0, 1]', 1)
    ([Judgement(score=0.8, problem='')], '')
    """
    if not isinstance(answer, str):
        return _no_scores(f"got {type(answer).__name__}, {_EXPECTED}", count)
    if len(answer) > MAX_ANSWER_CHARS:
        return _no_scores(f"got {len(answer):,} characters, expected at most {MAX_ANSWER_CHARS:,}", count)
    known = [str(number) for number in range(1, count + 1)]
    begin = max(answer.rfind("</think>"), 0)
    spans = [span for span in json_spans(answer) if span[1] > begin]
    if broken := _key_outside(answer, begin, spans):
        return _no_scores(f"got {broken} outside of valid JSON, {_EXPECTED}", count)
    incomplete = ""
    found: list[Judgement] | None = None
    partial: list[dict[str, Judgement]] = []
    for value in (_decode(answer[start:end]) for start, end in spans):
        entries = _score_entries(value)
        if not entries:
            if _has_answer_key(value):
                return _no_scores(f"got an answer without ids and scores, {_EXPECTED}", count)
            continue
        by_id = {name: read_judgement(scores) for name, scores in entries}
        if wrong := _wrong_ids([name for name, _ in entries], known):
            incomplete = wrong
            partial.append(by_id)
            continue
        judgements = [by_id[name] for name in known]
        if found is not None and found != judgements:
            return _no_scores(f"got two different answers for all trajectories, {_EXPECTED}", count)
        found = judgements
    if found is None:
        return _no_scores(f"got {incomplete or repr(answer[-200:])}, {_EXPECTED}", count)
    complete = dict(zip(known, found, strict=True))
    for part in partial:
        if differing := sorted(name for name in part.keys() & complete if part[name] != complete[name]):
            return _no_scores(
                f"got two scores for trajectory {', '.join(differing)[:100]}, {_EXPECTED}", count
            )
    return found, ""


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


def _no_scores(problem: str, count: int) -> tuple[list[Judgement], str]:
    return [Judgement(None, problem)] * count, problem


def _key_outside(answer: str, begin: int, spans: Sequence[tuple[int, int]]) -> str:
    """Returns a key that only an answer has, if it stands outside of every JSON value."""
    for start, end in zip(
        (begin, *(end for _, end in spans)), (*(start for start, _ in spans), None), strict=True
    ):
        if end is None or start < end:
            match = _ANSWER_KEY.search(answer, start, len(answer) if end is None else end)
            if match is not None:
                return match[0]
    return ""


def _score_entries(value: Any) -> list[tuple[str, list[Any]]]:
    """Returns the ids of a JSON value with their scores; none if the value is not an answer."""
    if isinstance(value, _Object) and (tables := value.values_of(_SCORES_KEY)):
        value = tables[0] if len(tables) == 1 else None
    if isinstance(value, list) and all(isinstance(item, _Object) for item in value):
        names = [item.values_of(_ID_KEY) for item in value]
        if all(len(ids) == 1 and isinstance(ids[0], str | int) for ids in names):
            return [(str(ids[0]), item.values_of(_SCORE_KEY)) for ids, item in zip(names, value, strict=True)]
    if isinstance(value, _Object) and all(name.isascii() and name.isdigit() for name, _ in value):
        return [
            (name, score.values_of(_SCORE_KEY) if isinstance(score, _Object) else [score])
            for name, score in value
        ]
    return []


def _has_answer_key(value: Any) -> bool:
    """Whether a JSON value has a key that only an answer has, although it is none."""
    parts = value if isinstance(value, list) else [value]
    return any(
        isinstance(part, _Object) and any(part.values_of(key) for key in (_ID_KEY, _SCORE_KEY, _SCORES_KEY))
        for part in parts
    )


def _wrong_ids(names: Sequence[str], known: Sequence[str]) -> str:
    """Returns which ids are missing, unknown or there several times; empty if none is."""
    counts = Counter(names)
    kinds = (
        ("no score for trajectory", [name for name in known if name not in counts]),
        ("several scores for trajectory", [name for name in known if counts[name] > 1]),
        ("the unknown trajectory", sorted(set(counts) - set(known))),
    )
    return "; ".join(f"{kind} {', '.join(ids)[:100]}" for kind, ids in kinds if ids)


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
