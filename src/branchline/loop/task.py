"""One line of a data set, read: a prompt, and what the agent has to work on it with.

Data sets come as JSON, and as tables, in which a column that a row says nothing about is null and a list is
an array. Either way a task is the same value.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from branchline.core.errors import InputError
from branchline.core.json_fields import replace_surrogates_deep
from branchline.core.message import Message
from branchline.core.reader import read_messages
from branchline.loop.limits import LoopLimits, is_optional
from branchline.runtime.sampling import SAMPLING_FIELDS

_MESSAGE_FIELDS = ("messages", "prompt")
_SAMPLING_FIELDS = (*SAMPLING_FIELDS, "stop", "parallel_tool_calls", "response_format")


class Task(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One line of a data set: a prompt, and what the agent has to work on it with."""

    messages: tuple[Message, ...]
    agent_name: str = ""
    """Who works on it; none is `single_turn`."""
    id: str = ""
    tools: tuple[str, ...] | None = None
    """Names; None is all there are."""
    tool_arguments: dict[str, dict[str, Any]] = {}
    """What each tool's instance is created with."""
    interaction: str = ""
    """A name; none is nobody."""
    interaction_arguments: dict[str, Any] = {}
    sampling: dict[str, Any] = {}
    """As Chat Completions calls it: `temperature`, `top_p`, `seed`, `stop`, … How long an answer may be is
    a limit, and what the model is told of tools is their business."""
    template: dict[str, Any] = {}
    """Arguments of the chat template."""
    limits: LoopLimits | None = None
    """Its own, in place of everybody's."""
    extra: dict[str, Any] = {}
    """Whatever else the line says, for those who judge."""

    def __post_init__(self) -> None:
        for name in self.sampling:
            if name not in _SAMPLING_FIELDS:
                raise InputError(f"sampling: got {name!r}, expected any of {', '.join(_SAMPLING_FIELDS)}")

    @classmethod
    def read(cls, raw: object) -> Task:
        """From a line of a data set: messages as Chat Completions writes them, under `messages` or `prompt`.

        A prompt that is only a text is a user's; null is not said; arrays are lists.

        >>> task = Task.read({"prompt": "2+2?", "answer": 4})
        >>> task.messages[0].text, task.extra
        ('2+2?', {'answer': 4})
        """
        if not isinstance(raw, Mapping):
            raise InputError(f"task: got {raw!r}, expected an object")
        where = next((name for name in _MESSAGE_FIELDS if raw.get(name) is not None), _MESSAGE_FIELDS[0])
        said = _arrays_to_lists(raw.get(where))
        given = replace_surrogates_deep(
            _arrays_to_lists({name: value for name, value in raw.items() if name != where})
        )
        known = _drop_nulls({name: given.pop(name) for name in cls.__struct_fields__ if name in given})
        try:
            # Types and names of everything else; messages have their own reader.
            task = msgspec.convert({**known, "messages": ()}, cls)
        except msgspec.ValidationError as error:
            raise InputError(f"task: {error}") from error
        if isinstance(said, str) and said:
            said = [{"role": "user", "content": said}]
        messages = read_messages(said, where)
        return msgspec.structs.replace(task, messages=messages, extra={**task.extra, **given})


def _arrays_to_lists(value: Any) -> Any:
    """Arrays and their numbers as Python's own, at any depth."""
    try:
        return _arrays_to_lists_nested(value)
    except RecursionError:
        raise InputError("task: got a value, expected one that is not nested so deep") from None


def _arrays_to_lists_nested(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _arrays_to_lists_nested(item) for name, item in value.items()}
    as_list = getattr(value, "tolist", None)
    if as_list is not None:
        value = as_list()
    return [_arrays_to_lists_nested(item) for item in value] if isinstance(value, list | tuple) else value


def _drop_nulls(known: dict[str, Any]) -> dict[str, Any]:
    """The fields that a line says something in. Tables fill with null what other lines say."""
    said = {name: value for name, value in known.items() if value is not None}
    for name in ("tool_arguments", "sampling"):
        if isinstance(said.get(name), dict):
            said[name] = {key: value for key, value in said[name].items() if value is not None}
    if isinstance(said.get("limits"), dict):
        limits = said["limits"].items()
        said["limits"] = {name: value for name, value in limits if value is not None or is_optional(name)}
    if isinstance(said.get("id"), int) and not isinstance(said["id"], bool):
        said["id"] = str(said["id"])
    return said
