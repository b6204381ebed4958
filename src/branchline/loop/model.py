"""What a loop asks: a session's model, in process or over HTTP, in the same words and with the same record.

`SessionModel` runs the gateway's own calls on a session, without HTTP between; `remote.HttpModel` asks a
gateway. Either way a call is a path of the session's tree, and the same conversation gives the same tree.

Cancelling whoever waits in `ask` is the client going away: what was sampled until then stays in the tree as
a cancelled call. Asked again under the same name, the model goes on behind its very ids, and what it had said
to nobody it says again. The name is chosen before anything is sent, so a cancel can come at any moment.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from typing import Any, Protocol

from branchline.chat.base import Codec
from branchline.core.call import DEFAULT_AGENT, Request
from branchline.core.errors import MessageError, SessionError
from branchline.core.json_fields import replace_surrogates_deep
from branchline.core.message import Message
from branchline.core.sample import Sample
from branchline.core.tools import ToolList
from branchline.engines.base import Engine
from branchline.runtime.call_lifecycle import prepare_call, run_call
from branchline.runtime.call_record import CallRecord, CallRequest, CallResult
from branchline.runtime.managed_session import ManagedSession
from branchline.runtime.resume import new_call_id
from branchline.runtime.sampling import (
    merge_sampling,
    read_bool,
    read_int,
    read_sampling_params,
    read_strings,
)

ToolSchemas = Sequence[Mapping[str, Any]]


class Model(Protocol):
    """The model of one session."""

    @property
    def codec(self) -> Codec | None:
        """Its tokens, where they are known here; results can be cut by tokens then."""
        ...

    async def ask(
        self,
        messages: Sequence[Message],
        *,
        tools: ToolSchemas = (),
        params: Mapping[str, Any] | None = None,
        call_name: str = "",
    ) -> CallResult:
        """The answer to a conversation. `params` are those of Chat Completions; the session's own sampling
        goes before them, but an answer never has more than the `max_tokens` that are given here.

        A call that was asked under this name before is gone on with.
        """
        ...

    async def count_tokens(
        self, messages: Sequence[Message], *, tools: ToolSchemas = (), params: Mapping[str, Any] | None = None
    ) -> int:
        """How many tokens the prompt of a conversation has. Nothing is sampled or recorded."""
        ...

    async def samples(self) -> list[Sample]:
        """What the session would be trained on now."""
        ...


class SessionModel:
    """A session and an engine in this process."""

    def __init__(self, live: ManagedSession, engine: Engine, *, agent: str = "") -> None:
        self.managed = live
        self.engine = engine
        self.agent = agent or live.options.agent or DEFAULT_AGENT

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
            # Calls under way hold what is left to sample; one that is over gives back what it did not use.
            over = [asyncio.ensure_future(event.wait()) for event in self.managed.running_calls.values()]
            try:
                await asyncio.wait(over, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for waiter in over:
                    waiter.cancel()

    async def _ask(
        self, messages: Sequence[Message], tools: ToolSchemas, params: Mapping[str, Any], name: str
    ) -> CallResult:
        call_request = self._call_request(messages, tools, params)
        record = self._call_record(new_call_id(self.managed, name=name))
        async with aclosing(run_call(self.managed, self.engine, call_request, record)) as events:
            # Read to the end: the call counts as delivered when its last event was taken.
            async for _ in events:
                pass
        assert record.result is not None, "a call ends with its result, or raises"
        return record.result

    async def count_tokens(
        self, messages: Sequence[Message], *, tools: ToolSchemas = (), params: Mapping[str, Any] | None = None
    ) -> int:
        turn = await prepare_call(self.managed, self._call_request(messages, tools, params or {}))
        return len(turn.prompt_ids)

    async def samples(self) -> list[Sample]:
        return (await asyncio.to_thread(self.managed.export)).samples

    def _call_record(self, call_id: str) -> CallRecord:
        live = self.managed
        return CallRecord(
            live.id,
            "loop",
            call_id,
            live.created_at,
            agent=self.agent,
            group=live.options.group,
        )

    def _call_request(
        self,
        messages: Sequence[Message],
        tools: ToolSchemas,
        params: Mapping[str, Any],
    ) -> CallRequest:
        wanted = params.get("max_tokens")
        # A session's own sampling goes before the loop's, but never beyond its limits.
        most = None if wanted is None else read_int(params, "max_tokens", 1, 1, 2**31)
        given = merge_sampling(dict(params), self.managed.options)
        template = given.get("chat_template_kwargs", {})
        if not isinstance(template, Mapping):
            raise MessageError("chat_template_kwargs", template, "an object or null")
        request = Request(
            tuple(messages),
            tools if isinstance(tools, ToolList) else tuple(tools),
            chat_template_kwargs=replace_surrogates_deep(dict(template)),
            agent=self.agent,
        )
        return CallRequest(
            request,
            read_sampling_params(given, "max_tokens", max_tokens_limit=most),
            # A cancelled call keeps what was yielded, so tokens must not be buffered.
            stream=True,
            stop=read_strings(given, "stop"),
            single_tool_call=not read_bool(given, "parallel_tool_calls", True),
        )
