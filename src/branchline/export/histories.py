"""Histories: conversations as messages, and which of them the model sampled.

A history is read from a session, or built by hand from messages and choices as with ART. A choice is what a
server answered, as an OpenAI object or its JSON; the messages before it are its prompt.

    History(messages_and_choices=[{"role": "user", "content": "2+2?"}, response])     # with its prompt's ids
    History(messages_and_choices=[{"role": "user", "content": "2+2?"}, response.choices[0]], tools=tools)

What was given can be read back, equal and unchanged: a history has its own copy. `export/hand_built.py` turns
choices into a tree.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from typing import Any, NoReturn

import numpy as np

from branchline.core.call import Request, read_tools
from branchline.core.errors import InputError, MessageError
from branchline.core.message import Message
from branchline.core.reader import read_message
from branchline.core.token_arrays import Ids
from branchline.timelines.log import (
    LoggedOutput,
    check_prompt_count,
    read_choice,
    read_count,
    read_token_ids,
)
from branchline.timelines.token_texts import read_token_texts

_ITEMS = "messages_and_choices"


@dataclass(frozen=True)
class SampledChoice:
    """A choice of a hand-built history: its prompt as a request, what was sampled, and the ids that are known
    of both."""

    request: Request
    output: LoggedOutput
    prompt_ids: Ids | None = None
    index: int = 0
    """Its position in `messages_and_choices`."""
    response_id: str = ""
    choice_index: int | None = None
    """Its number in a response with several choices."""
    counted_tokens: int | None = None
    """How many tokens the server counted, of this choice or of all choices of its response."""

    def may_be(self, other: SampledChoice) -> bool:
        """Whether what the server said of both allows that they are one choice."""
        mine, theirs = self.output, other.output
        return (
            self.response_id in ("", other.response_id or self.response_id)
            and (self.choice_index is None or other.choice_index in (None, self.choice_index))
            and (
                self.prompt_ids is None
                or other.prompt_ids is None
                or np.array_equal(self.prompt_ids, other.prompt_ids)
            )
            and (mine.ids is None or theirs.ids is None or np.array_equal(mine.ids, theirs.ids))
            and (mine.is_cut or theirs.is_cut or mine.finish_reason == theirs.finish_reason)
            and (
                mine.logprobs is None
                or theirs.logprobs is None
                or np.array_equal(mine.logprobs, theirs.logprobs, equal_nan=True)
            )
        )

    @property
    def is_exact(self) -> bool:
        """Whether the ids of the prompt and of the answer are those of the server."""
        return self.prompt_ids is not None and self.output.ids is not None


@dataclass(frozen=True)
class History:
    """A conversation: its messages, and which of them the model sampled here."""

    messages: tuple[Message, ...] = ()
    sampled: tuple[int, ...] = ()
    """The positions of the sampled messages."""
    tools: Sequence[Mapping[str, Any]] | None = None
    """As given. A history that was read from a session has none: it keeps their ids and not their JSON."""
    agent: str = ""
    choices: tuple[SampledChoice, ...] = field(default=(), repr=False)
    """What the model sampled; only in a history that was built by hand."""
    messages_and_choices: Sequence[object] | None = field(default=None, kw_only=True, repr=False)
    """The items that a history was built from, as given: OpenAI objects, their JSON, or `Message`s. A whole
    response stands for its only choice. Only choices are trained."""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict, kw_only=True)
    """Arguments with which the chat template renders what is not known (`enable_thinking`, …)."""
    train_messages: InitVar[bool] = field(default=False, kw_only=True)
    """Assistant messages that are no choices are trained too."""

    def __post_init__(self, train_messages: bool) -> None:
        """Raises MessageError with the position of an item that cannot be read."""
        given = self.messages_and_choices
        if given is None or (self.messages and isinstance(given, ReadOnlyList)):
            return  # of a session, or read already
        items = _own_copy(given)
        tools = copy.deepcopy(self.tools)
        kwargs = copy.deepcopy(_read_kwargs(self.chat_template_kwargs))
        messages, choices = _read_items(items, tools, kwargs, self.agent, train_messages)
        own: dict[str, object] = {
            "messages": messages,
            "sampled": tuple(len(choice.request.messages) for choice in choices),
            "tools": tools,
            "choices": choices,
            _ITEMS: items,
            "chat_template_kwargs": kwargs,
        }
        for name, value in own.items():
            object.__setattr__(self, name, value)

    @classmethod
    def read(
        cls,
        messages_and_choices: Sequence[object],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        agent: str = "",
        chat_template_kwargs: Mapping[str, Any] | None = None,
        train_messages: bool = False,
    ) -> History:
        """Returns the history of messages and choices."""
        return cls(
            tools=tools,
            agent=agent,
            messages_and_choices=messages_and_choices,
            chat_template_kwargs={} if chat_template_kwargs is None else chat_template_kwargs,
            train_messages=train_messages,
        )

    @classmethod
    def of(cls, raw: object, path: str) -> History:
        """Returns a history from one, from its JSON, or from an object with the same attributes (ART's)."""
        if isinstance(raw, History):
            return raw
        known = (_ITEMS, "tools", "agent", "chat_template_kwargs")
        if isinstance(raw, Mapping):
            for key in raw:
                if key not in known:
                    raise MessageError(f"{path}.{key}", raw[key], f"one of {', '.join(known)}")
            fields = dict(raw)
        else:
            fields = {name: getattr(raw, name) for name in known if hasattr(raw, name)}
        if _ITEMS not in fields:
            raise MessageError(path, type(raw).__name__, f"a history with {_ITEMS}")
        return cls.read(fields.pop(_ITEMS), **fields)


class ReadOnlyList(list[Any]):
    """A list that does not change, and says so. It equals the list that it was made from."""

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise InputError(
            f"{_ITEMS}: a history does not change; append to a list of your own, and build the history last"
        )

    append = extend = insert = pop = remove = clear = sort = reverse = _refuse
    __setitem__ = __delitem__ = __iadd__ = __imul__ = _refuse

    def __reduce__(self) -> tuple[type[ReadOnlyList], tuple[list[Any]]]:
        return ReadOnlyList, (list(self),)


def _own_copy(items: Iterable[object]) -> ReadOnlyList:
    if isinstance(items, str | bytes | Mapping) or not isinstance(items, Iterable):
        raise MessageError(_ITEMS, items, "a list of messages and choices")
    return ReadOnlyList([_copy(item) for item in items])


def _copy(value: object) -> object:
    """Returns a deep copy; lists of token ids, which may be long, are copied at once."""
    if type(value) is dict:
        return {key: _copy(entry) for key, entry in value.items()}
    if type(value) is list:
        return list(value) if _is_ids(value) else [_copy(entry) for entry in value]
    return value if isinstance(value, Message) else copy.deepcopy(value)


def _is_ids(values: Sequence[object]) -> bool:
    return bool(values) and isinstance(values[0], int)


def _read_kwargs(kwargs: object) -> Mapping[str, Any]:
    if kwargs is None:
        return {}
    if not isinstance(kwargs, Mapping):
        raise MessageError("chat_template_kwargs", kwargs, "an object or None")
    return kwargs


def _read_items(
    items: Sequence[object],
    tools: Sequence[Mapping[str, Any]] | None,
    chat_template_kwargs: Mapping[str, Any],
    agent: str,
    train_messages: bool,
) -> tuple[tuple[Message, ...], tuple[SampledChoice, ...]]:
    tool_list = read_tools([_plain(tool) for tool in tools] if isinstance(tools, list | tuple) else tools)
    messages: list[Message] = []
    choices: list[SampledChoice] = []
    for index, item in enumerate(items):
        path = f"{_ITEMS}[{index}]"
        raw = item if isinstance(item, Message) else _to_json(item, path)
        is_answer = isinstance(raw, dict) and "role" not in raw and ("choices" in raw or "message" in raw)
        message = None
        if not is_answer:
            message = raw if isinstance(raw, Message) else read_message(raw, path)
            if not train_messages or message.role != "assistant":
                messages.append(message)
                continue
        if not messages:
            raise MessageError(path, "a choice", "a message before the first choice")
        request = Request(tuple(messages), tool_list, chat_template_kwargs=chat_template_kwargs, agent=agent)
        if message is not None:
            choice = SampledChoice(request, LoggedOutput(message), index=index)
        else:
            assert isinstance(raw, dict)
            choice = _read_answer(raw, path, request, index)
        choices.append(choice)
        messages.append(choice.output.message)
    return tuple(messages), tuple(choices)


def _read_answer(raw: Mapping[str, Any], path: str, request: Request, index: int) -> SampledChoice:
    """Reads a choice, or a response with one choice."""
    choice_path, choice = path, raw
    if "choices" in raw:
        choices = raw["choices"]
        if not isinstance(choices, list) or len(choices) != 1:
            count = len(choices) if isinstance(choices, list) else choices
            raise MessageError(f"{path}.choices", count, "one choice, or the choice itself as the item")
        choice_path, choice = f"{path}.choices[0]", choices[0]
    output = read_choice(choice, choice_path, raw.get("id"))
    prompts = [
        (f"{where}.prompt_token_ids", prompt)
        for where, prompt in (
            (path, raw.get("prompt_token_ids")),
            (choice_path, choice.get("prompt_token_ids")),
        )
        if prompt is not None
    ]
    read = [read_token_ids(prompt, where) for where, prompt in prompts]
    if len(prompts) == 2 and prompts[0][1] != prompts[1][1]:
        raise MessageError(prompts[1][0], prompts[1][1], f"those of {prompts[0][0]}")
    if output.logprobs is not None and output.ids is not None:
        texts = read_token_texts(choice["logprobs"], f"{choice_path}.logprobs")
        _check_named_ids(output.ids, texts, f"{choice_path}.logprobs")
    if output.ids is not None and not len(output.ids) and not output.message.is_empty:
        raise MessageError(f"{choice_path}.token_ids", [], "the ids of the answer")
    number = choice.get("index")
    prompt_ids = read[0] if read else None
    check_prompt_count(raw, path, prompt_ids, request)
    return SampledChoice(
        request,
        output,
        prompt_ids,
        index,
        str(raw.get("id") or ""),
        number if type(number) is int else None,
        read_count(raw, path, "completion_tokens"),
    )


def _check_named_ids(ids: Ids, texts: Sequence[bytes | None], path: str) -> None:
    """Raises MessageError for a token that is named by another id than that of its position."""
    for index, (token, text) in enumerate(zip(ids.tolist(), texts, strict=True)):
        if text is not None and text.startswith(b"token_id:") and text != b"token_id:%d" % token:
            raise MessageError(f"{path}.content[{index}].token", text.decode(), f"token_id:{token}")


def _to_json(item: object, path: str) -> dict[str, Any]:
    """Returns the JSON of an OpenAI object, extra fields such as `token_ids` included."""
    raw = _plain(item)
    if not isinstance(raw, dict):
        raise MessageError(path, type(item).__name__, "a message, a choice or a response")
    return raw


def _plain(value: object) -> object:
    """Returns a value with every object in it as JSON; a dict may hold OpenAI objects."""
    dump = getattr(value, "model_dump", None)
    if callable(dump) and not isinstance(value, type):
        value = dump(exclude_none=True)
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, list) and not _is_ids(value):
        return [_plain(entry) for entry in value]
    return value
