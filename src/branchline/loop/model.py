"""The model of a session as a loop uses it, in process or over HTTP, with the same results and record.

`SessionModel` runs calls directly on a session; `http_model.HttpModel` sends them to a gateway. Both make the
call a path of the session's tree, and the same conversation gives the same tree.

Cancelling `ask` cancels the call: the tokens sampled so far stay in the tree as a cancelled call. Asking
again with the same `call_name` resumes it after exactly these ids, or repeats a complete answer. The
name is chosen before the request is sent, so a cancellation may come at any time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from branchline.chat.base import Codec
from branchline.core.call import DEFAULT_AGENT, Request, ToolList
from branchline.core.errors import CompactionError, EngineError, JournalError, MessageError, SessionError
from branchline.core.message import Message
from branchline.core.reader import replace_surrogates_deep
from branchline.core.reward import RewardData, read_rewards
from branchline.core.sample import Sample
from branchline.engines.base import Engine
from branchline.export.samples import Export
from branchline.runtime.call_lifecycle import prepare_call, run_call
from branchline.runtime.call_record import (
    CallFailure,
    CallObserver,
    CallRecord,
    CallRequest,
    CallResult,
    attempts_of,
    new_call_id,
)
from branchline.runtime.managed_session import ManagedSession
from branchline.runtime.request_fields import LOOP_FIELDS, review_fields
from branchline.runtime.sampling import (
    find_overridden,
    merge_sampling,
    read_bool,
    read_int,
    read_sampling_params,
    read_strings,
    read_tool_choice,
)

ToolSchemas = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class SessionInfo:
    """A session as its agent may see it."""

    id: str
    created_at: float
    call_ids: tuple[str, ...]


class SessionControl(Protocol):
    """The session of a model: what it is, its rewards and its end."""

    @property
    def session_id(self) -> str:
        """The session's id; empty if it is not known here."""
        ...

    @property
    def base_url(self) -> str:
        """The address of the session's model API; empty for a session in this process."""
        ...

    @property
    def can_control(self) -> bool:
        """Whether the session can be rewarded and ended from here."""
        ...

    async def read_session(self) -> SessionInfo:
        """The session's id and its calls so far."""
        ...

    async def reward(self, reward: RewardData) -> None:
        """Posts a score, an object with a score, or a list of such objects."""
        ...

    async def complete(self, reason: str = "") -> None:
        """Marks the agent as done; later rewards and calls are still accepted."""
        ...

    async def finalize(self, reason: str = "") -> None:
        """Closes the session."""
        ...

    async def abort(self, reason: str = "") -> None:
        """Closes the session; its samples are not exported unless a caller asks for them."""
        ...


class Model(Protocol):
    """The model of one session."""

    @property
    def codec(self) -> Codec | None:
        """The codec, needed to truncate tool results by tokens; None if it is not known here."""
        ...

    @property
    def session(self) -> SessionControl:
        """The session that the model's calls are recorded in."""
        ...

    async def ask(
        self,
        messages: Sequence[Message],
        *,
        tools: ToolSchemas = (),
        params: Mapping[str, Any] | None = None,
        call_name: str = "",
    ) -> CallResult:
        """The answer to a conversation. `params` are fields of Chat Completions; the session's `sampling`
        overrides them, but an answer never has more than the `max_tokens` given here.

        An earlier call with this `call_name` is resumed.
        """
        ...

    async def count_tokens(
        self, messages: Sequence[Message], *, tools: ToolSchemas = (), params: Mapping[str, Any] | None = None
    ) -> int:
        """The number of tokens in the prompt of a conversation. Nothing is sampled or recorded."""
        ...

    async def samples(
        self,
        *,
        include_aborted: bool = False,
        keep_calls: Sequence[str] = (),
        policy: Mapping[str, Any] | None = None,
    ) -> list[Sample]:
        """The samples of `export`."""
        ...

    async def export(
        self,
        *,
        include_aborted: bool = False,
        keep_calls: Sequence[str] = (),
        policy: Mapping[str, Any] | None = None,
    ) -> Export:
        """The session's training samples so far, and the report on every sampled token; the samples of an
        aborted session only with `include_aborted`.

        `keep_calls` are names of calls whose tokens are included although they were cancelled. `policy` has
        the fields of ExportPolicy that differ from the session's, for example `{"max_samples": 4}`.
        """
        ...


class SessionModel:
    """A session and an engine in this process."""

    def __init__(
        self,
        managed: ManagedSession,
        engine: Engine,
        *,
        agent: str = "",
        observers: Sequence[CallObserver] = (),
    ) -> None:
        """`observers` get the record of each call, as those of a gateway do: traces, for example."""
        self._observers = observers
        self.managed = managed
        self.engine = engine
        self.agent = agent or managed.options.agent or DEFAULT_AGENT

    @property
    def codec(self) -> Codec:
        return self.managed.session.codec

    async def ask(
        self,
        messages: Sequence[Message],
        *,
        tools: ToolSchemas = (),
        params: Mapping[str, Any] | None = None,
        call_name: str = "",
    ) -> CallResult:
        while True:
            try:
                return await self._ask(messages, tools, params or {}, call_name)
            except SessionError as error:
                if error.kind != "busy" or not self.managed.running_calls:
                    raise
            # Running calls have reserved the remaining tokens; one that ends returns what it did not use.
            waiters = [asyncio.ensure_future(event.wait()) for event in self.managed.running_calls.values()]
            try:
                await asyncio.wait(waiters, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for waiter in waiters:
                    waiter.cancel()

    async def _ask(
        self, messages: Sequence[Message], tools: ToolSchemas, params: Mapping[str, Any], name: str
    ) -> CallResult:
        managed = self.managed
        call_request = self._call_request(messages, tools, params)
        call_id = new_call_id(managed, name=name)
        record = CallRecord(
            managed.id, "loop", call_id, managed.created_at, agent=self.agent, group=managed.options.group
        )
        record.call_request, record.status = call_request, 0
        try:
            async with aclosing(run_call(managed, self.engine, call_request, record)) as events:
                # Read to the end: a call is delivered when its last event has been taken.
                async for _ in events:
                    pass
        except asyncio.CancelledError:
            record.outcome = "cancelled"
            raise
        except Exception as error:
            is_failure = isinstance(error, EngineError | JournalError | CompactionError)
            record.outcome, record.failure = (
                "failed" if is_failure else "refused",
                CallFailure.from_error(error),
            )
            raise
        finally:
            record.total_s = time.perf_counter() - record.started_perf_s
            for observe in self._observers:
                observe(record)
        assert record.result is not None, "a call yields its result or raises"
        return record.result

    async def count_tokens(
        self, messages: Sequence[Message], *, tools: ToolSchemas = (), params: Mapping[str, Any] | None = None
    ) -> int:
        turn = await prepare_call(self.managed, self._call_request(messages, tools, params or {}))
        return len(turn.prompt_ids)

    async def samples(
        self,
        *,
        include_aborted: bool = False,
        keep_calls: Sequence[str] = (),
        policy: Mapping[str, Any] | None = None,
    ) -> list[Sample]:
        export = await self.export(include_aborted=include_aborted, keep_calls=keep_calls, policy=policy)
        return export.samples

    async def export(
        self,
        *,
        include_aborted: bool = False,
        keep_calls: Sequence[str] = (),
        policy: Mapping[str, Any] | None = None,
    ) -> Export:
        kept = attempts_of(self.managed, keep_calls)
        changed = replace(self.managed.default_export_policy, **(policy or {}))
        export = partial(self.managed.export, changed, include_aborted=include_aborted, keep_calls=kept)
        return await asyncio.to_thread(export)

    # -- the session ---------------------------------------------------------------------------------

    @property
    def session(self) -> SessionModel:
        return self

    @property
    def session_id(self) -> str:
        return self.managed.id

    @property
    def base_url(self) -> str:
        return ""

    @property
    def can_control(self) -> bool:
        return True

    async def read_session(self) -> SessionInfo:
        managed = self.managed
        return SessionInfo(
            managed.id, managed.created_at, tuple([call.id for call in managed.session.tree.calls])
        )

    async def reward(self, reward: RewardData) -> None:
        await self.managed.post_rewards(read_rewards(reward))

    async def complete(self, reason: str = "") -> None:
        await self.managed.end("completed", reason)

    async def finalize(self, reason: str = "") -> None:
        await self.managed.end("finalized", reason)

    async def abort(self, reason: str = "") -> None:
        await self.managed.end("aborted", reason)

    def _call_request(
        self, messages: Sequence[Message], tools: ToolSchemas, params: Mapping[str, Any]
    ) -> CallRequest:
        is_limited = params.get("max_tokens") is not None
        limit = read_int(params, "max_tokens", 1, 1, 2**31) if is_limited else None
        fields = merge_sampling(dict(params), self.managed.options)
        other_fields = {name: fields[name] for name in fields.keys() - LOOP_FIELDS}
        requested, _ = review_fields(other_fields, ignore_unknown=False)
        template = fields.get("chat_template_kwargs", {})
        if not isinstance(template, Mapping):
            raise MessageError("chat_template_kwargs", template, "an object or null")
        tool_choice = read_tool_choice(fields)
        shown_tools = () if tool_choice == "none" else tools
        request = Request(
            tuple(messages),
            shown_tools if isinstance(shown_tools, ToolList) else tuple(shown_tools),
            chat_template_kwargs=replace_surrogates_deep(dict(template)),
            agent=self.agent,
        )
        return CallRequest(
            request,
            read_sampling_params(fields, "max_tokens", max_tokens_limit=limit),
            # A cancelled call keeps only tokens that were yielded, so they must not be buffered.
            stream=True,
            stop=read_strings(fields, "stop"),
            single_tool_call=not read_bool(fields, "parallel_tool_calls", True),
            tool_choice=tool_choice,
            other_fields=other_fields,
            requested=requested,
            overridden_fields=find_overridden(params, self.managed.options),
        )
