"""Enforces what a session may use: tokens that it may sample, a thread that prepares its prompts.

Calls of a session run concurrently. So the tokens that a call may sample are reserved before it samples: all
calls together never exceed the limit. The size of a request is checked before work is spent on it. Large
requests are parsed and prepared in threads of their own, which neither the control API nor the journal uses,
and those of one session one at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec
import numpy as np

from branchline.core.errors import MessageError, SessionError
from branchline.engines.base import Chunk
from branchline.runtime.call_record import CallRequest
from branchline.runtime.managed_session import ManagedSession
from branchline.runtime.sampling import FALLBACK_MAX_TOKENS, NO_LIMIT

Result = TypeVar("Result")

THREAD_BODY_BYTES = 100_000
"""Bodies of this size and more are parsed in a thread, so that the event loop is not blocked."""

_COUNT_BYTES = 1 << 18
_items_decoder = msgspec.json.Decoder(list[msgspec.Raw])
_LONG_REQUEST = 250_000
_prepare_thread = ThreadPoolExecutor(1, thread_name_prefix="branchline-prepare")
"""One thread: two would take the interpreter from each other, and both would end later."""
_long_prepare_thread = ThreadPoolExecutor(1, thread_name_prefix="branchline-prepare-long")
"""For requests of _LONG_REQUEST bytes or characters and more, so that shorter ones do not wait for them."""


async def run_in_prepare_thread(
    managed: ManagedSession, function: Callable[[], Result], request_size: int
) -> Result:
    """Runs a function that parses or prepares a request of some bytes or characters, when no thread works for
    the session.

    A caller that is cancelled does not end the work of a thread, which keeps the lock of the session.
    """
    thread = _prepare_thread if request_size < _LONG_REQUEST else _long_prepare_thread
    await managed.prepare_lock.acquire()
    work = asyncio.get_running_loop().run_in_executor(thread, function)
    work.add_done_callback(lambda _: managed.prepare_lock.release())
    try:
        return await asyncio.shield(work)
    finally:
        del work  # has the error whose traceback has this frame: such a cycle would keep a body in memory


@contextmanager
def reserve_tokens(
    managed: ManagedSession, call_request: CallRequest, max_tokens: int, partial: Sequence[Chunk] = ()
) -> Iterator[int]:
    """Reserves tokens for a call and yields how many each of its answers may have, `partial` included.

    `max_tokens` is what an answer may have by its request and its engine. `partial` is what a resumed call
    sampled already: these tokens are counted in the tree, so only the rest is reserved.
    """
    limit, begun, reserved = managed.options.limits.tokens, sum([len(chunk.ids) for chunk in partial]), 0
    if limit is not None:
        is_finished = bool(partial) and partial[-1].finish_reason is not None
        if not is_finished:
            reserved = _tokens_to_reserve(
                managed, call_request, limit, max_tokens - begun, is_begun=begun > 0
            )
        max_tokens = min(max_tokens, begun + reserved)
    managed.reserved_tokens += reserved * call_request.n
    try:
        yield max_tokens
    finally:
        managed.reserved_tokens -= reserved * call_request.n


def _tokens_to_reserve(
    managed: ManagedSession, call_request: CallRequest, limit: int, max_tokens: int, *, is_begun: bool
) -> int:
    """How many further tokens each answer may have in a session with a limit."""
    left, n = limit - managed.sampled_tokens, call_request.n
    if left <= 0:
        if is_begun:
            # The resumed answer ends here, as it would have without the interruption.
            return 0
        raise SessionError(
            "out_of_tokens", f"session {managed.id} may sample {limit} tokens and has sampled them"
        )
    free = (left - managed.reserved_tokens) // n
    if free <= 0 < max_tokens:
        if managed.reserved_tokens:
            raise SessionError(
                "busy",
                f"session {managed.id} may sample {limit} tokens, and running calls have reserved the rest;"
                " try again in a moment",
            )
        raise SessionError(
            "out_of_tokens",
            f"session {managed.id} may sample {limit} tokens; {left} are left, too few for n={n}",
        )
    if call_request.params.max_tokens == NO_LIMIT:
        # A call without a limit of its own must leave tokens to concurrent calls.
        max_tokens = min(max_tokens, max(FALLBACK_MAX_TOKENS, free // 2))
    return max(0, min(free, max_tokens))


# -- size of a request -------------------------------------------------------------------------------


def check_json_values(data: bytes, limit: int) -> None:
    """Raises MessageError if a body may have more JSON values than this; nothing is decoded."""
    count = 0
    characters = np.frombuffer(data, np.uint8)
    for start in range(0, len(data), _COUNT_BYTES):  # in parts that fit in a processor's cache
        part = characters[start : start + _COUNT_BYTES]
        # "[" and "{" differ in one bit.
        count += int(np.count_nonzero(part == ord(",")) + np.count_nonzero(part | 0x20 == ord("{")))
        if count > limit:
            problem = f"more than {limit} commas and opening brackets"
            raise MessageError("body", problem, f"at most {limit}")


def check_item_counts(fields: Mapping[str, Any], max_messages: int, max_tools: int) -> None:
    """Raises MessageError if a body has too many messages or tools; they are counted before they are read."""
    for name, limit in (
        ("messages", max_messages),
        ("input", max_messages),
        ("tools", max_tools),
        ("functions", max_tools),
    ):
        items = fields.get(name)
        if isinstance(items, msgspec.Raw):
            try:
                items = _items_decoder.decode(items)
            except msgspec.DecodeError:
                continue  # the protocol's own error says what is wrong
        if isinstance(items, list) and len(items) > limit:
            raise MessageError(name, f"{len(items)} items", f"at most {limit}")


def check_prompt_characters(call_request: CallRequest, limit: int) -> None:
    """Raises MessageError if messages and tools have more text than this; images do not count."""
    request, prompt = call_request.request, call_request.raw_prompt
    count = len(prompt) if isinstance(prompt, str) else 0
    for message in request.messages:
        count += len(message.content) + len(message.reasoning_content)
        count += sum(len(call.arguments) for call in message.tool_calls)
    count += sum(len(msgspec.json.encode(tool)) for tool in request.tools)
    if count > limit:
        raise MessageError("messages", f"{count} characters", f"at most {limit} in messages and tools")
