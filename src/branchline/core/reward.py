"""A reward: a finite score for a session or for a part of it. There is one rule for what is read as one.

    1.0     true     {"score": 0.5, "turn": 2}     [{"score": 1}, {"score": 0, "agent": "critic"}]

A score is a number; true is 1 and false is 0. `call`, `turn`, `timeline`, `tool` and `agent` name the part.
Everything else that is to be kept with it stands under `extras`. A program need not write `extras`: other
keys of its objects are put there. A client of the HTTP API has to.
"""

from __future__ import annotations

import json
import math
import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from numbers import Real
from string import ascii_lowercase
from typing import Any, NotRequired, TypedDict, cast

import msgspec

from branchline.core.errors import MessageError

RewardData = float | Mapping[str, Any] | Sequence[Mapping[str, Any]]
"""What a program may give as a reward; `read_rewards` reads it."""
PART_KEYS = ("call", "turn", "timeline", "tool", "agent")
"""A reward with one of these is not for the whole session."""
_KNOWN_KEYS = ("score", *PART_KEYS, "id", "extras")
_PARTS = {frozenset(parts.split()) for parts in (
    "", "call", "turn", "timeline", "tool", "agent", "turn agent", "tool call", "tool turn", "tool agent",
    "tool turn agent",
)}  # fmt: skip
_PARTS_TEXT = (
    "one part: a call, a turn, a timeline, a tool or an agent; a turn may be of an agent, and a tool of a "
    "call, a turn or an agent"
)
_PART_WORD = re.compile(
    r"_*([a-z]+?)[\s_-]*(?:s|ids?|names?|index|idx|numbers?|num|no|nr|key)?_*", re.IGNORECASE
)
"""A word, with what people add to the name of a part."""
_MAX_INT = 2**31 - 1
_NAMES = {
    "call": "the id of a call of this session",
    "tool": "the name of a tool",
    "agent": "the name of an agent; the reward of the session is for agents without a name",
}
_SCORE = "a finite number, true or false"


class Reward(TypedDict):
    """A reward as it is stored, exported and sent."""

    score: float
    call: NotRequired[str]
    """The answers of a call, by the id of its response."""
    turn: NotRequired[int]
    """An answer of the main conversation, or of an agent's, from 1 on."""
    turn_node: NotRequired[int]
    """The node of the answer that `turn` named when the reward was posted."""
    timeline: NotRequired[int]
    """All timelines through the node that ends or ended the timeline with this id."""
    tool: NotRequired[str]
    agent: NotRequired[str]
    id: NotRequired[str | int]
    extras: NotRequired[dict[str, Any]]


def read_rewards(raw: object, *, strict: bool = False) -> list[Reward]:
    """Returns rewards from a score, an object with a score, or a list of such objects.

    Other keys of an object are put into its `extras`, or refused if `strict`. Raises MessageError for what is
    no reward, or could not be recorded.

    >>> read_rewards(True), read_rewards([{"score": 2, "turn": 1, "note": "x"}])
    ([{'score': 1.0}], [{'score': 2.0, 'turn': 1, 'extras': {'note': 'x'}}])
    """
    if not isinstance(raw, list | tuple):
        return [_read_reward(raw, strict)]
    for item in raw or [raw]:
        if not isinstance(item, Mapping):
            raise MessageError("reward", raw, "a list of objects with a score")
    return [_read_reward(item, strict) for item in raw]


def make_reward(
    score: float,
    *,
    call: str | None = None,
    turn: int | None = None,
    timeline: int | None = None,
    tool: str | None = None,
    agent: str | None = None,
    id: str | int | None = None,
    **extras: Any,
) -> Reward:
    """Returns a reward from the arguments of the `reward` methods; None is not given."""
    known = {"call": call, "turn": turn, "timeline": timeline, "tool": tool, "agent": agent, "id": id}
    given = {name: value for name, value in known.items() if value is not None}
    return _read_reward({"score": score, **given, **extras}, strict=False)


def read_recorded_reward(recorded: Mapping[str, Any]) -> Reward:
    """Returns a reward of a journal or a snapshot. Releases that had no `extras` stored them beside the
    score."""
    known_keys = (*_KNOWN_KEYS, "turn_node")
    others = {name: value for name, value in recorded.items() if name not in known_keys}
    extras = recorded.get("extras")
    if not others and ("extras" not in recorded or isinstance(extras, dict)):
        return cast(Reward, dict(recorded))
    known = {name: value for name, value in recorded.items() if name in known_keys and name != "extras"}
    kept = extras if isinstance(extras, dict) else {} if extras is None else {"extras": extras}
    return cast(Reward, {**known, "extras": {**others, **kept}})


def decode_json(data: bytes) -> Any:
    """Returns a JSON value. Raises ValueError, also for what Python's `json` accepts: NaN and infinite
    numbers, and names that occur twice in an object."""
    try:
        return json.loads(data.decode(), parse_constant=_refuse_constant, object_pairs_hook=_read_object)
    except RecursionError:
        raise ValueError("too deeply nested") from None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _read_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name!r} occurs twice in an object")
        found[name] = value
    return found


def _read_reward(raw: object, strict: bool) -> Reward:
    if not isinstance(raw, Mapping):
        return {"score": read_score(raw)}
    others = {name: value for name, value in raw.items() if name not in _KNOWN_KEYS}
    if strict and others:
        name = next(iter(others))
        raise MessageError("field", name, f"one of {', '.join(_KNOWN_KEYS)}; anything else under `extras`")
    for name, value in others.items():
        _check_extra_name(name, value)
    reward: dict[str, Any] = {"score": read_score(raw.get("score"))}
    given = {name: raw[name] for name in PART_KEYS if name in raw}
    if frozenset(given) not in _PARTS:
        raise MessageError("reward", given, _PARTS_TEXT)
    for name, value in given.items():
        reward[name] = _read_part(name, value)
    if "id" in raw:
        if not isinstance(raw["id"], str | int) or isinstance(raw["id"], bool):
            raise MessageError("id", raw["id"], "a text or a whole number")
        reward["id"] = raw["id"]
    extras = raw.get("extras", {})
    if not isinstance(extras, Mapping):
        raise MessageError("extras", extras, "an object")
    for name in others:
        if name in extras:
            raise MessageError(name, others[name], "one value, but `extras` has the name, too")
    if others or extras:
        reward["extras"] = _read_extras({**others, **extras})
    _check_recordable("reward", reward)
    return cast(Reward, reward)


def _misspellings(name: str) -> Iterator[str]:
    """Yields a name, and what one letter more, less or another, or two swapped ones, make of it."""
    for index in range(len(name) + 1):
        before, here, after = name[:index], name[index : index + 1], name[index + 1 :]
        yield before + after
        yield before + after[:1] + here + after[1:]
        for letter in ascii_lowercase:
            yield before + letter + after
            yield before + letter + here + after


_MISSPELT_PARTS = {word: name for name in PART_KEYS for word in _misspellings(name)}


def _check_extra_name(name: object, value: object) -> None:
    """Refuses a key that was meant as another one: its score would count for the whole session."""
    if not isinstance(name, str):
        raise MessageError("reward", name, "names that are text")
    if name == "reward":
        raise MessageError(name, value, "`score`; to keep it beside a score, put it under `extras`")
    match = _PART_WORD.fullmatch(name)
    words = (re.sub(r"[\s_-]", "", name), match[1] if match is not None else "")
    part = next((part for word in words if (part := _MISSPELT_PARTS.get(word.lower()))), None)
    if part is not None:
        raise MessageError(name, value, f"other keys: did you mean `{part}`? Else put it under `extras`")


def read_score(score: object, name: str = "score") -> float:
    """Returns a finite number; true is 1 and false is 0. Raises MessageError for anything else."""
    # A scalar of numpy or an array of one number without axes, as torch has it.
    item = getattr(score, "item", None)
    if callable(item) and getattr(score, "ndim", None) == 0:
        score = item()
    if not isinstance(score, Real | Decimal):
        raise MessageError(name, score, _SCORE)
    try:
        number = float(score)
    except (ValueError, OverflowError):
        raise MessageError(name, score, _SCORE) from None
    if not math.isfinite(number):
        raise MessageError(name, score, "a finite number")
    return number


def _read_part(name: str, value: object) -> str | int:
    if name in ("turn", "timeline"):
        try:
            number = None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
        except TypeError:
            number = None
        if number is None or not 1 <= number <= _MAX_INT:
            what = "number of an answer, from 1 on" if name == "turn" else "id of a timeline of this session"
            raise MessageError(name, value, f"the {what}")
        return number
    if not isinstance(value, str) or not value:
        raise MessageError(name, value, _NAMES[name])
    return value


def _read_extras(extras: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a copy as JSON has it; numbers of numpy and torch become plain ones."""
    for name, value in extras.items():
        if not isinstance(name, str):
            raise MessageError("extras", name, "names that are text")
        _check_recordable(name, value)
    copied: dict[str, Any] = json.loads(json.dumps(dict(extras), default=_to_plain))
    return copied


def _check_recordable(name: str, value: object) -> None:
    """Raises MessageError for what the journal or JSON cannot hold: a recorded reward is permanent."""
    try:
        plain = json.loads(json.dumps(value, allow_nan=False, default=_to_plain))
        msgspec.json.encode(plain)
        msgspec.msgpack.encode(plain)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise MessageError(name, type(value).__name__, f"JSON ({error})") from None


def _to_plain(value: object) -> Any:
    item = getattr(value, "item", None)
    if callable(item) and getattr(value, "ndim", None) == 0:
        return item()
    raise TypeError(f"{type(value).__name__} is not JSON")
