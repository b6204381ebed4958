"""A call: what was asked, what the engine gave, and what became of it.

`Request` comes in, `Generation` comes out of an engine, `Call` is the record of both in a tree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from branchline.core.echo import Equivalence
from branchline.core.errors import MessageError
from branchline.core.json_fields import replace_surrogates_deep
from branchline.core.message import Message
from branchline.core.reader import ToolList, json_digest, read_messages, read_tools
from branchline.core.token_arrays import Floats, Ids, Runs

DEFAULT_AGENT = ""
RAW_PROMPT_DIGEST = b"raw prompt"
"""Keeps bare prompts apart from conversations that say the same."""


class Delivery(StrEnum):
    """Whether an output reached the client that asked for it."""

    PENDING = "pending"
    """Not known yet."""
    DELIVERED = "delivered"
    LOST = "lost"
    """The client was gone before the output was whole (a timeout, a dropped connection)."""
    CANCELLED = "cancelled"
    """Stopped on purpose; what was sampled until then is kept."""


@dataclass(frozen=True)
class Request:
    """One inbound request, free of its protocol: the conversation so far and who asks."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the chat template (`enable_thinking`, …): part of a prompt's identity."""
    agent: str = DEFAULT_AGENT
    retry_count: int = 0
    """How often the client says it has sent this before (an SDK's retry header)."""
    spawned_by: str = ""
    """The agent that started this one, where a header says so."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    equivalences: tuple[Equivalence, ...] = ()
    """What reading the request already had to tolerate."""
    trainable: bool = True
    """Whether its outputs are for training; a judge's or a title's may not be."""
    resume_call_id: str = ""
    """The id of a cancelled call that this one goes on from, behind the ids it had sampled."""
    is_raw_prompt: bool = False
    """A bare prompt that no template frames: its one message is the whole of it."""
    has_instructions: bool = False
    """Its first message are instructions for this answer alone: who goes on from it leaves them out."""

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
        """A request from the body of a chat completion request, but for what is read or known already."""
        if tools is None:
            tools = read_tools(body.get("tools"))
        template = body.get("chat_template_kwargs")
        if template is not None and not isinstance(template, dict):
            raise MessageError("chat_template_kwargs", template, "an object or null")
        tolerated = (Equivalence.EMPTY_TOOLS,) if not tools and body.get("tools") is not None else ()
        return cls(
            read_messages(body.get("messages")) if messages is None else messages,
            tools,
            chat_template_kwargs=replace_surrogates_deep(template or {}),
            agent=agent,
            equivalences=tolerated,
            **known,
        )

    @cached_property
    def message_keys(self) -> bytes:
        """The keys of all messages, end to end."""
        return b"".join([message.key for message in self.messages])

    @cached_property
    def prompt_config_digest(self) -> bytes:
        """What decides a prompt beside its messages: the tools and the template's arguments."""
        if self.is_raw_prompt:
            return RAW_PROMPT_DIGEST
        tools = self.tools if isinstance(self.tools, ToolList) else ToolList(map(dict, self.tools))
        parts = tools.digest, json_digest(dict(self.chat_template_kwargs))
        return xxhash.xxh3_128_digest(b"%b/%b" % parts) if any(parts) else b""


@dataclass(frozen=True)
class Generation:
    """What an engine gave for a prompt: ids out, and all that is known of each."""

    ids: Ids
    logprobs: Floats | None = None
    versions: int | NDArray[np.integer] = 0
    """The policy version that sampled each token, or one for all."""
    finish_reason: str = "stop"
    message: Message | None = None
    """The output as parsed; None lets the codec parse it."""
    routed_experts: NDArray[np.integer] | None = None
    """One row per sampled token, for mixture models that replay their routing."""
    inexact: bool = False
    """The ids were encoded from text, because what was sampled is not known."""


class AppliedEquivalence(msgspec.Struct, frozen=True, array_like=True):
    """An equivalence that was used to recognise the message at `index` of a request."""

    message_index: int
    equivalence: Equivalence


class Output(msgspec.Struct, frozen=True, array_like=True):
    """The sampled part of a node, beyond its ids."""

    call_index: int
    choice_index: int = 0
    finish_reason: str = "stop"
    logprobs: Floats | None = None
    versions: Runs = ()
    routed_experts: NDArray[np.integer] | None = None
    inexact: bool = False
    """Sampled behind other ids than those on its path, or as other ids (foreign logs, upstreams)."""


class Call(msgspec.Struct, frozen=True, array_like=True):
    """The record of one request and its outputs."""

    index: int
    """Order of commit within the session."""
    id: str
    agent: str
    prompt_node: int
    """The node the prompt ends on (the generation prompt belongs to the outputs)."""
    outputs: tuple[int, ...]
    prompt_tokens: int
    prompt_config_digest: bytes = b""
    """What keeps first messages apart beside what they say; none where tool lists are ignored."""
    requested_config_digest: bytes = b""
    """The digest of the tools and template arguments asked for."""
    applied_equivalences: tuple[AppliedEquivalence, ...] = ()
    ambiguous_match: bool = False
    """Several recorded outputs fitted an echo and nothing but their age decided."""
    encoded_tokens: int = 0
    rewrite_reason: str = ""
    """Why the template did not show the matched path as it was sampled (`think_strip`), if it did not."""
    retry_count: int = 0
    spawned_by: str = ""
    sampling: Mapping[str, Any] = {}
    reused_nodes: tuple[int, ...] = ()
    """Nodes sampled elsewhere that this prompt shows as context."""
    template_time: float = 0.0
    """The moment that the session's templates show as now, in seconds since 1970."""
    trainable: bool = True
    """Whether its outputs are for training."""
    resumed_call_index: int = -1
    """The cancelled call whose tokens its output begins with; they count here and no longer there."""
    has_instructions: bool = False
    """Its first message were instructions for it alone. Others may have sent the same words as a message, and
    share the node: so it is the call that knows."""
