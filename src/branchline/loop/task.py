"""One row of a dataset: a prompt, what the agent may use, and the limits of its loop.

Rows come from JSON or from tables, in which an absent field is null and a list is an array. Both give equal
tasks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import Any, Literal, get_args, get_type_hints

import msgspec

from branchline.core.errors import InputError
from branchline.core.message import Message
from branchline.core.reader import read_messages, replace_surrogates_deep
from branchline.runtime.request_fields import SAMPLING_FIELDS

KeptPart = Literal["head", "tail", "both"]
TruncateUnit = Literal["tokens", "characters"]

ToolMethod = Literal["execute", "calc_reward", "release"]
_MESSAGE_FIELDS = ("messages", "prompt")
_SAMPLING_FIELDS = (*SAMPLING_FIELDS, "stop", "parallel_tool_calls", "response_format")
_VERL_KWARGS = ("create_kwargs", "execute_kwargs", "calc_reward_kwargs", "release_kwargs")
DOCUMENT_NAME = "document"
"""The name of a row's `document_content`."""
_MAY_BE_ZERO = ("tool_response_length", "max_user_turns")


class LoopLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """When a loop stops, and how long its parts may take; None is no limit.

    If no limit here bounds an answer, the session's `max_tokens` does, else the gateway's
    `default_max_tokens`, else the room that the prompt leaves in the model's context, or 4096 tokens if the
    engine does not report its context length. A session's `max_tokens` never exceeds a limit given here.
    """

    max_assistant_turns: int | None = None
    """Answers of the model. The last answer that a limit allows is still passed to the interaction to be
    scored, if it called no tool; the interaction's reply is not shown to the model and counts as no turn."""
    max_user_turns: int | None = None
    """Replies to the model: the results of one turn's tool calls are one, a user message is one."""
    max_parallel_calls: int = 8
    """Tool calls that run at the same time; further calls wait."""
    tool_response_length: int | None = None
    """The length of each tool result; a longer one is truncated."""
    tool_response_unit: TruncateUnit = "tokens"
    tool_response_keep: KeptPart = "both"
    """What is kept of a longer result: its head, its tail, or both and not the middle."""
    tool_timeout_s: float | None = 60.0
    """One tool call, or one `calc_reward`; waiting for other calls does not count."""
    tool_create_timeout_s: float | None = 120.0
    """One `create` of a tool."""
    tool_release_timeout_s: float | None = 30.0
    """One `release` of a tool, or one `finalize` of an interaction."""
    interaction_timeout_s: float | None = 600.0
    """One `start`, `respond` or `score` of an interaction; exceeding it is an error."""
    response_length: int | None = None
    """All tokens after the first prompt: sampled answers, tool results and user messages."""
    model_length: int | None = None
    """A prompt and its answer together."""
    max_new_tokens: int | None = None
    """One answer."""
    wall_clock_s: float | None = None
    """All runs of a trajectory together; the step that exceeds it is abandoned. Creating, scoring and
    releasing have limits of their own and do not count."""
    cancel_grace_s: float = 1.0
    """How long a cancelled call of a tool or an interaction may take to finish before it is abandoned."""

    def __post_init__(self) -> None:
        for name, hint in _hints().items():
            value = getattr(self, name)
            if not _is_valid(name, value, hint):
                raise InputError(f"limits.{name}: got {value!r}, expected {_expected(name, hint)}")

    @property
    def needs_token_counts(self) -> bool:
        """Whether a prompt's tokens have to be counted before it is sent."""
        return self.response_length is not None or self.model_length is not None


class Task(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A prompt, and what the agent may use to work on it."""

    messages: tuple[Message, ...]
    agent_name: str = ""
    """The registered agent that works on it; empty is `single_turn`."""
    id: str = ""
    tools: tuple[str, ...] | None = None
    """Names of registered tools; None is all of them."""
    tool_arguments: dict[str, dict[str, Any]] = {}
    """The arguments of each tool's `create`."""
    interaction: str = ""
    """The name of a registered interaction; empty is none."""
    interaction_arguments: dict[str, Any] = {}
    sampling: dict[str, Any] = {}
    """Fields of Chat Completions: `temperature`, `top_p`, `seed`, `stop`, … The length of an answer is a
    limit, and tools are given by `tools`."""
    template: dict[str, Any] = {}
    """Arguments of the chat template."""
    documents: dict[str, str] = {}
    """Texts outside the context by name, for the tools of the agent `state`."""
    tool_method_arguments: dict[str, dict[ToolMethod, dict[str, Any]]] = {}
    """Further arguments of each tool's `execute`, `calc_reward` and `release`."""
    limits: LoopLimits | None = None
    """Overrides the limits that all tasks share, field by field."""
    limit_fields: tuple[str, ...] | None = None
    """The fields of `limits` that override; None: those that differ from their defaults."""
    extra: dict[str, Any] = {}
    """All other fields of the row, for example what a reward needs."""

    def __post_init__(self) -> None:
        for name in self.sampling:
            if name not in _SAMPLING_FIELDS:
                raise InputError(f"sampling: got {name!r}, expected any of {', '.join(_SAMPLING_FIELDS)}")

    def merge_limits(self, shared: LoopLimits) -> LoopLimits:
        """The shared limits with the fields that the task sets.

        >>> task = Task((), limits=LoopLimits(max_user_turns=2))
        >>> limits = task.merge_limits(LoopLimits(max_assistant_turns=4, max_user_turns=9))
        >>> limits.max_assistant_turns, limits.max_user_turns
        (4, 2)
        """
        if self.limits is None:
            return shared
        own = msgspec.structs.asdict(self.limits)
        fields = self.limit_fields
        if fields is None:
            defaults = msgspec.structs.asdict(LoopLimits())
            fields = tuple([name for name, value in own.items() if value != defaults[name]])
        return msgspec.structs.replace(shared, **{name: own[name] for name in fields})

    @classmethod
    def read(cls, row: object) -> Task:
        """A task from a row whose messages are Chat Completions messages under `messages` or `prompt`.

        A prompt that is a string becomes a user message. Null fields are absent; arrays are lists. verl's
        `tools_kwargs` and `interaction_kwargs`, also in `extra_info`, become our fields. A text under
        `document_content` becomes the document named `document`.

        >>> task = Task.read({"prompt": "2+2?", "answer": 4})
        >>> task.messages[0].content, task.extra
        ('2+2?', {'answer': 4})
        """
        if not isinstance(row, Mapping):
            raise InputError(f"task: got {row!r}, expected an object")
        field = next((name for name in _MESSAGE_FIELDS if row.get(name) is not None), _MESSAGE_FIELDS[0])
        prompt = to_lists(row.get(field))
        values = replace_surrogates_deep(to_lists({k: value for k, value in row.items() if k != field}))
        known = _drop_nulls({name: values.pop(name) for name in cls.__struct_fields__ if name in values})
        _add_verl_fields(known, values)
        content = values.pop("document_content", None)
        if content is not None:
            _require_absent(known, "document_content", "documents")
            known["documents"] = {DOCUMENT_NAME: content}
        if isinstance(known.get("limits"), dict):
            known["limit_fields"] = list(known["limits"])
        try:
            task = msgspec.convert({**known, "messages": ()}, cls)
        except msgspec.ValidationError as error:
            raise InputError(f"task: {error}") from error
        if isinstance(prompt, str) and prompt:
            prompt = [{"role": "user", "content": prompt}]
        messages = read_messages(prompt, field)
        return msgspec.structs.replace(task, messages=messages, extra={**task.extra, **values})


def _add_verl_fields(known: dict[str, Any], values: dict[str, Any]) -> None:
    """Replaces verl's fields of a row by ours. Raises InputError for names that verl does not have."""
    info = values.get("extra_info")
    nested = info if isinstance(info, dict) else {}
    tools_kwargs, interaction_kwargs = (
        values.pop(name, None) or nested.get(name) for name in ("tools_kwargs", "interaction_kwargs")
    )
    if tools_kwargs:
        _require_object("tools_kwargs", tools_kwargs)
        _require_absent(known, "tools_kwargs", "tool_arguments", "tool_method_arguments")
        create: dict[str, Any] = {}
        others: dict[str, dict[str, Any]] = {}
        known["tool_arguments"], known["tool_method_arguments"] = create, others
        for tool, methods in tools_kwargs.items():
            if methods is None:
                continue
            _require_object(f"tools_kwargs.{tool}", methods)
            for name, arguments in methods.items():
                if name not in _VERL_KWARGS:
                    raise InputError(
                        f"tools_kwargs.{tool}: got {name!r}, expected one of {', '.join(_VERL_KWARGS)}"
                    )
                if arguments is None:
                    continue
                if name == "create_kwargs":
                    create[tool] = arguments
                else:
                    others.setdefault(tool, {})[name.removesuffix("_kwargs")] = arguments
    if interaction_kwargs:
        _require_object("interaction_kwargs", interaction_kwargs)
        _require_absent(known, "interaction_kwargs", "interaction", "interaction_arguments")
        arguments = dict(interaction_kwargs)
        known["interaction"] = arguments.pop("name", None)
        if not isinstance(known["interaction"], str) or not known["interaction"]:
            raise InputError(
                f"interaction_kwargs.name: got {known['interaction']!r}, expected the interaction's name"
            )
        known["interaction_arguments"] = arguments


def _require_object(name: str, value: object) -> None:
    if not isinstance(value, dict):
        raise InputError(f"{name}: got {value!r}, expected an object")


def _require_absent(known: Mapping[str, Any], name: str, *others: str) -> None:
    for other in others:
        if known.get(other):
            raise InputError(f"{name}: got it together with {other}, expected one of them")


def is_optional(name: str) -> bool:
    """Whether a limit can be None; for one that cannot, a null in a table means its default.

    >>> is_optional("wall_clock_s"), is_optional("max_parallel_calls")
    (True, False)
    """
    return name not in _hints() or type(None) in get_args(_hints()[name])


@cache
def _hints() -> dict[str, object]:
    """The types of all limits; they can be read only after the class is defined."""
    return get_type_hints(LoopLimits)


def _is_valid(name: str, value: object, hint: object) -> bool:
    try:
        msgspec.convert(value, hint)
    except msgspec.ValidationError:
        return False
    if not isinstance(value, int | float):
        return True
    return math.isfinite(value) and (value > 0 if name.endswith("_s") else value >= _minimum(name))


def _minimum(name: str) -> int:
    return 0 if name in _MAY_BE_ZERO else 1


def _expected(name: str, hint: object) -> str:
    choices = get_args(hint)
    if choices and all(isinstance(choice, str) for choice in choices):
        return f"one of {', '.join(choices)}"
    kind = "a number of more than 0" if name.endswith("_s") else f"a whole number of {_minimum(name)} or more"
    return f"{kind}, or null for no limit" if choices else kind


def to_lists(value: Any) -> Any:
    """A copy in which arrays and their numbers are Python lists and numbers, at any depth."""
    try:
        return _to_lists_nested(value)
    except RecursionError:
        raise InputError("task: got a value that is nested too deeply") from None


def _to_lists_nested(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _to_lists_nested(item) for name, item in value.items()}
    to_list = getattr(value, "tolist", None)
    if to_list is not None:
        value = to_list()
    return [_to_lists_nested(item) for item in value] if isinstance(value, list | tuple) else value


def _drop_nulls(known: dict[str, Any]) -> dict[str, Any]:
    """The fields without nulls: a table stores null for every field that another row has."""
    fields = {name: value for name, value in known.items() if value is not None}
    for name in ("tool_arguments", "sampling"):
        if isinstance(fields.get(name), dict):
            fields[name] = {key: value for key, value in fields[name].items() if value is not None}
    if isinstance(fields.get("limits"), dict):
        limits = fields["limits"].items()
        fields["limits"] = {name: value for name, value in limits if value is not None or is_optional(name)}
    if isinstance(fields.get("id"), int) and not isinstance(fields["id"], bool):
        fields["id"] = str(fields["id"])
    return fields
