"""Going on where a cancelled call stopped, behind the very ids it had sampled.

What a cancelled call sampled is in the tree. A request that names it (`x-branchline-resume`) begins with
those ids and samples the rest; the new call then holds the whole answer and the old one counts no more: its
tokens are in the new one, with their logprobs and versions. A call that left nothing behind is begun again.

A client can name its call before it sends it (`x-branchline-call`). Sent again under the same name, however
little was heard of it, the call goes on from the attempt before: one that was cancelled, or one that was
answered when nobody listened any more. So a client that may be cut off at any moment loses nothing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from branchline.core.call import Call, Delivery
from branchline.core.errors import MessageError, SessionError
from branchline.core.token_arrays import Ids, as_ids
from branchline.engines.base import Chunk, SamplingParams
from branchline.runtime.answer import AnswerBuilder, AnswerDelta
from branchline.runtime.headers import CALL_HEADER
from branchline.runtime.managed_session import ManagedSession
from branchline.tree.tree import Turn

_CALL_NAME = re.compile(r"[A-Za-z0-9._-]{1,96}")
_ATTEMPT_SEPARATOR = "~"
"""Not in a name: behind it stands the number of an attempt."""


def next_attempt_id(live: ManagedSession, name: str) -> str:
    """The id of the next attempt at a call that its client named: the name, name~2, name~3, …"""
    if not _CALL_NAME.fullmatch(name):
        raise MessageError(CALL_HEADER, name, "letters, digits, '-', '_' or '.', at most 96")
    count = live.attempt_counts.get(name)
    if count is None:
        # Not since the start; but there may have been one before.
        tries = [call.id for call in live.session.tree.calls if _call_name(call.id) == name]
        count = max([_attempt_number(call_id) for call_id in tries], default=0)
    live.attempt_counts[name] = count + 1
    return _attempt_id(name, count + 1)


async def find_earlier_attempt(live: ManagedSession, call_id: str) -> str:
    """The attempt before this one that left something behind; "" if none did."""
    for number in range(_attempt_number(call_id) - 1, 0, -1):
        earlier = _attempt_id(_call_name(call_id), number)
        running = live.running_calls.get(earlier)
        if running is not None:
            await running.wait()
        if live.session.tree.find_call(earlier) is not None:
            return earlier
    return ""


def _attempt_id(name: str, number: int) -> str:
    return name if number == 1 else f"{name}{_ATTEMPT_SEPARATOR}{number}"


def _call_name(call_id: str) -> str:
    return call_id.partition(_ATTEMPT_SEPARATOR)[0]


def _attempt_number(call_id: str) -> int:
    _, again, number = call_id.partition(_ATTEMPT_SEPARATOR)
    return int(number) if again and number.isdigit() else 1


async def load_partial(live: ManagedSession, turn: Turn, choices: int, as_call: str) -> list[Chunk]:
    """What the call that a turn goes on from had sampled, a chunk for each policy version.

    If it was over, the last one says how it ended.
    """
    call_id = turn.request.resume_call_id
    if not call_id:
        return []
    if choices != 1:
        raise MessageError("n", choices, "1: one answer was begun and one goes on")
    running = live.running_calls.get(call_id)
    if running is not None:
        # Its client has just left; what it had is on the way into the tree.
        await running.wait()
    tree = live.session.tree
    call = tree.find_call(call_id)
    if call is None:
        return []
    _check_resumable(live, turn, call, as_call)
    node = tree.nodes[call.outputs[0]]
    assert node.output is not None
    assert node.sampled_ids is not None
    chunks: list[Chunk] = []
    start = 0
    for count, version in node.output.versions:
        part = slice(start, start + count)
        logprobs = None if node.output.logprobs is None else node.output.logprobs[part]
        chunks.append(Chunk(node.sampled_ids[part], logprobs, version))
        start += count
    if tree.delivery(call) != Delivery.CANCELLED:
        chunks.append(Chunk(finish_reason="length" if node.output.finish_reason == "length" else "stop"))
    return chunks


def _check_resumable(live: ManagedSession, turn: Turn, call: Call, as_call: str) -> None:
    tree = live.session.tree
    node = tree.nodes[call.outputs[0]]
    # Whoever sends a call again under its own name has not heard the answer; and nothing follows it then.
    is_again = _call_name(call.id) == _call_name(as_call) and not node.children
    if len(call.outputs) != 1 or (tree.delivery(call) != Delivery.CANCELLED and not is_again):
        raise SessionError("conflict", f"resume: call {call.id} is no cancelled call with one answer")
    if tree.is_resumed(call):
        raise SessionError("conflict", f"resume: call {call.id} was resumed already")
    if not np.array_equal(tree.path_ids(node)[: node.sampled_start], turn.prompt_ids):
        raise SessionError("conflict", f"resume: call {call.id} had another prompt than this one")


def replay_partial(
    choice: AnswerBuilder, chunks: Sequence[Chunk], params: SamplingParams, prompt_ids: Ids
) -> tuple[list[AnswerDelta], Ids, SamplingParams]:
    """Feeds a choice what was there before; the rest is asked for behind it, if there is a rest."""
    said: list[AnswerDelta] = []
    for chunk in chunks:
        said.append(choice.add_chunk(chunk))
        if choice.is_stopped:
            break
    ids = choice.ids
    left = params.for_continuation(len(ids))
    stopped = choice.is_stopped or (len(ids) > 0 and int(ids[-1]) in params.stop_ids)
    if chunks[-1].finish_reason is not None:
        left = params.for_continuation(params.max_tokens)
    elif stopped or left.max_tokens <= 0:
        if not choice.is_stopped:
            said.append(choice.add_chunk(Chunk(finish_reason="stop" if stopped else "length")))
        left = params.for_continuation(params.max_tokens)
    return said, as_ids(np.concatenate((prompt_ids, ids))), left
