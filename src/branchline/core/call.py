"""A call: its request with its tools, its generations and its delivery.

A `Request` comes from a client, a `Generation` from an engine; a `Call` is the record of both in a tree. The
tool list of a request is read once and identified by a digest.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from branchline.core.errors import InputError, MessageError
from branchline.core.message import Message, canonical_json
from branchline.core.reader import read_messages, replace_surrogates_deep
from branchline.core.token_arrays import Floats, Ids, Runs

DEFAULT_AGENT = ""
RAW_PROMPT_DIGEST = b"raw prompt"
"""Separates raw prompts from conversations with equal messages."""


class Delivery(StrEnum):
    """Whether an output reached the client that requested it."""

    PENDING = "pending"
    """Not known yet."""
    DELIVERED = "delivered"
    LOST = "lost"
    """The client disconnected before the output was complete (a timeout, a dropped connection)."""
    CANCELLED = "cancelled"
    """Stopped on purpose; the tokens sampled until then are kept."""


class Equivalence(StrEnum):
    """A change that clients make to a message without changing its meaning."""

    EMPTY_CONTENT = "empty_content"
    """`null`, `""` and absent content are interchanged."""
    PART_LIST = "part_list"
    """A text sent as a list of text parts, or the reverse."""
    EMPTY_CALLS = "empty_calls"
    """`tool_calls: null` or `[]` for a message without calls."""
    RENAMED_IDS = "renamed_ids"
    """Ids of tool calls replaced or omitted."""
    ARGUMENTS_RESERIALISED = "arguments_reserialised"
    """The same JSON with other spacing, key order, escapes or number spelling."""
    PYTHON_LITERALS = "python_literals"
    """Arguments that are not JSON but parse as a Python literal (`False` for `false`)."""
    EMPTY_ARGUMENTS = "empty_arguments"
    """Empty arguments for `{}`."""
    DEFAULTS_FILLED = "defaults_filled"
    """Arguments with a default in the tool's schema, added or omitted."""
    REORDERED_CALLS = "reordered_calls"
    """Parallel calls in another order; their results are put back into the sampled order."""
    REORDERED_RESULTS = "reordered_results"
    """Tool results in another order than their calls."""
    TRIMMED_WHITESPACE = "trimmed_whitespace"
    """Whitespace around the text or the reasoning removed."""
    DROPPED_REASONING = "dropped_reasoning"
    """Reasoning not sent back."""
    NAMED = "named"
    """A `name` added or omitted."""
    EMPTY_TOOLS = "empty_tools"
    """`tools: []` for no tools."""


# -- tools --------------------------------------------------------------------------------------------


class CachedJsonDict(dict[str, Any]):
    """An object that is no longer modified; its JSON text is made once."""

    @cached_property
    def json_text(self) -> str:
        return json.dumps(self, ensure_ascii=False)


class ToolList(tuple[dict[str, Any], ...]):
    """The tools of a request. Derived values are cached, because every request repeats its tools."""

    @cached_property
    def digest(self) -> bytes:
        return json_digest([dict(tool) for tool in self])

    @cached_property
    def has_strict_tools(self) -> bool:
        """Whether a tool asks that its arguments always match its schema."""
        functions = [tool.get("function") for tool in self]
        return any(isinstance(function, dict) and function.get("strict") is True for function in functions)

    @cached_property
    def cached_json_dicts(self) -> list[CachedJsonDict]:
        """The tools for a chat template, which may render their JSON."""
        return [CachedJsonDict(tool) for tool in self]


def read_tools(raw: object, field_path: str = "tools") -> ToolList:
    """Reads the tool list of a request; null, absent and empty are equal."""
    if raw is None:
        return ToolList()
    if not isinstance(raw, list | tuple):
        raise MessageError(field_path, raw, "a list of tools (objects) or null")
    for index, tool in enumerate(raw):
        if not isinstance(tool, dict):
            raise MessageError(f"{field_path}[{index}]", tool, "a tool (an object)")
    tools: Sequence[dict[str, Any]] = raw
    try:
        msgspec.json.encode(tools)
    except (UnicodeEncodeError, TypeError, OverflowError, RecursionError):
        # Rare: texts that UTF-8 cannot encode. Values that are not JSON are rejected by `json_digest`.
        tools = replace_surrogates_deep(tools)
    return ToolList(tools)


def json_digest(*values: object) -> bytes:
    """Returns 16 bytes that identify JSON values regardless of key order; b"" if all values are empty."""
    if not any(values):
        return b""
    try:
        return xxhash.xxh3_128_digest(b"\0".join([canonical_json(value) for value in values]))
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"tools and template arguments: expected JSON values, but {error}") from error


# -- calls --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Request:
    """One inbound request, independent of its wire protocol: the conversation so far and the agent."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the chat template (`enable_thinking`, …); they identify a prompt together with `tools`."""
    agent: str = DEFAULT_AGENT
    retry_count: int = 0
    """The value of the SDK's retry header: how often the client has sent this request before."""
    spawned_by: str = ""
    """The agent that started this one, from a request header."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    equivalences: tuple[Equivalence, ...] = ()
    """Equivalences that were applied while reading the request."""
    trainable: bool = True
    """Whether the outputs are for training (those of a judge or a title generator may not be)."""
    resume_call_id: str = ""
    """The id of a cancelled call to continue: the output starts with the ids that call had sampled."""
    is_raw_prompt: bool = False
    """A raw prompt without a chat template: its single message is the entire prompt."""
    has_instructions: bool = False
    """The first message is instructions for this call only; a follow-up request omits them."""

    @classmethod
    def read(
        cls,
        body: Mapping[str, Any],
        *,
        agent: str = DEFAULT_AGENT,
        messages: tuple[Message, ...] | None = None,
        tools: ToolList | None = None,
        **known: Any,
    ) -> Request:
        """Reads the body of a chat completion request; `messages`, `tools` and `known` fields override it."""
        if tools is None:
            tools = read_tools(body.get("tools"))
        template_kwargs = body.get("chat_template_kwargs")
        if template_kwargs is not None and not isinstance(template_kwargs, dict):
            raise MessageError("chat_template_kwargs", template_kwargs, "an object or null")
        equivalences = (Equivalence.EMPTY_TOOLS,) if not tools and body.get("tools") is not None else ()
        return cls(
            read_messages(body.get("messages")) if messages is None else messages,
            tools,
            chat_template_kwargs=replace_surrogates_deep(template_kwargs) if template_kwargs else {},
            agent=agent,
            equivalences=equivalences,
            **known,
        )

    @cached_property
    def message_keys(self) -> bytes:
        """The keys of all messages, concatenated."""
        return b"".join([message.key for message in self.messages])

    @cached_property
    def prompt_config_digest(self) -> bytes:
        """Digest of what determines a prompt apart from its messages: tools and template arguments."""
        if self.is_raw_prompt:
            return RAW_PROMPT_DIGEST
        tools = self.tools if isinstance(self.tools, ToolList) else ToolList(map(dict, self.tools))
        kwargs = json_digest(dict(self.chat_template_kwargs)) if self.chat_template_kwargs else b""
        return xxhash.xxh3_128_digest(b"%b/%b" % (tools.digest, kwargs)) if tools.digest or kwargs else b""


@dataclass(frozen=True)
class Generation:
    """One output of an engine: the sampled ids and per-token data."""

    ids: Ids
    logprobs: Floats | None = None
    versions: int | NDArray[np.integer] = 0
    """The policy version that sampled each token, or one version for all."""
    finish_reason: str = "stop"
    message: Message | None = None
    """The parsed output; if None, the codec parses the ids."""
    inexact: bool = False
    """The ids were encoded from text because the sampled ids are not known."""


class AppliedEquivalence(msgspec.Struct, frozen=True, array_like=True):
    """An equivalence used to recognise a message of a request; -1 stands for the request itself."""

    message_index: int
    equivalence: Equivalence


class Output(msgspec.Struct, frozen=True, array_like=True):
    """Data of a node's sampled ids."""

    call_index: int
    choice_index: int = 0
    finish_reason: str = "stop"
    logprobs: Floats | None = None
    versions: Runs = ()
    inexact: bool = False
    """The model saw other ids than those on the path, or sampled other ids (foreign logs, upstreams)."""
    estimated: bool = False
    """Inexact, and ids of the output or of its context were encoded from text, estimated or not logged."""


class Call(msgspec.Struct, frozen=True, array_like=True):
    """The record of one request and its outputs."""

    index: int
    """Order of commit within the session."""
    id: str
    agent: str
    prompt_node: int
    """The last node of the prompt (the generation prompt belongs to the output nodes)."""
    outputs: tuple[int, ...]
    prompt_tokens: int
    prompt_config_digest: bytes = b""
    """Part of the key of the first message; empty in merged logs that ignore tool lists."""
    requested_config_digest: bytes = b""
    """The digest of the requested tools and template arguments."""
    applied_equivalences: tuple[AppliedEquivalence, ...] = ()
    ambiguous_match: bool = False
    """Several recorded outputs matched an echo and only their age decided."""
    encoded_tokens: int = 0
    rewrite_reason: str = ""
    """Why the template did not render the matched path as sampled (`think_strip`), empty if it did."""
    retry_count: int = 0
    spawned_by: str = ""
    sampling: Mapping[str, Any] = {}
    reused_nodes: tuple[int, ...] = ()
    """Nodes sampled elsewhere that this prompt repeats as context."""
    template_time: float = 0.0
    """The current time as the session's templates show it, in seconds since 1970."""
    trainable: bool = True
    """Whether its outputs are for training."""
    resumed_call_index: int = -1
    """The cancelled call whose tokens this output starts with; they are counted here and not there."""
    has_instructions: bool = False
    """The first message was instructions for this call only. Kept on the call, because a call that sent the
    same text as a regular message shares the node."""

    @property
    def not_applied(self) -> tuple[str, ...]:
        """What the request asked for and nobody did: accepted, not applied."""
        return tuple(self.sampling.get("not_applied", ()))


def count_not_applied(calls: Iterable[Call]) -> dict[str, int]:
    """Returns what calls asked for and nobody did, with the number of calls."""
    return dict(sorted(Counter(name for call in calls for name in call.not_applied).items()))
