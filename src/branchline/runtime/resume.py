"""Resumes cancelled calls from the exact ids they had sampled.

The tree holds what a cancelled call sampled. A request that names that call (`x-branchline-resume`) starts
with those ids and samples the rest. The new call then holds the complete answer, with all logprobs and
versions, and the cancelled one is no longer counted. A call that left nothing is sampled from the start.

A client can also name its call before sending it (`x-branchline-call`). Sent again under the same name, the
call resumes the earlier attempt, whether that was cancelled or answered after the client disconnected. So a
client that may be interrupted at any moment loses nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from branchline.core.call import Call, Delivery
from branchline.core.errors import MessageError, SessionError
from branchline.core.token_arrays import Ids, as_ids
from branchline.engines.base import Chunk, SamplingParams
from branchline.runtime.answer import AnswerBuilder, AnswerDelta
from branchline.runtime.call_record import attempt_id, attempt_number, call_name
from branchline.runtime.managed_session import ManagedSession
from branchline.tree.tree import Turn


async def find_earlier_attempt(managed: ManagedSession, call_id: str) -> str:
    """Returns the id of the latest earlier attempt that left something in the tree; "" if none did.

    Waits for earlier attempts that are still running.
    """
    for number in range(attempt_number(call_id) - 1, 0, -1):
        earlier = attempt_id(call_name(call_id), number)
        running = managed.running_calls.get(earlier)
        if running is not None:
            await running.wait()
        if managed.session.tree.find_call(earlier) is not None:
            return earlier
    return ""


async def load_partial(managed: ManagedSession, turn: Turn, n: int, call_id: str) -> list[Chunk]:
    """Returns what the call that a turn resumes had sampled, one chunk per policy version.

    If that call finished, a last chunk has its finish reason. Raises SessionError if it cannot be resumed.
    """
    resumes = turn.request.resume_call_id
    if n != 1:
        raise MessageError("n", n, "1: a resumed call has one answer")
    running = managed.running_calls.get(resumes)
    if running is not None:
        # Its client has just disconnected, and the call is about to be committed.
        await running.wait()
    tree = managed.session.tree
    call = tree.find_call(resumes)
    if call is None:
        return []
    _check_resumable(managed, turn, call, call_id)
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


def _check_resumable(managed: ManagedSession, turn: Turn, call: Call, call_id: str) -> None:
    tree = managed.session.tree
    node = tree.nodes[call.outputs[0]]
    # A client that repeats a named call did not get the answer, if no later message follows that answer.
    is_repeated = call_name(call.id) == call_name(call_id) and not node.children
    if len(call.outputs) != 1 or (tree.delivery(call) != Delivery.CANCELLED and not is_repeated):
        raise SessionError("conflict", f"resume: call {call.id} is no cancelled call with one answer")
    if tree.is_resumed(call):
        raise SessionError("conflict", f"resume: call {call.id} was resumed already")
    path_ids = turn.prompt_ids if turn.path_ids is None else turn.path_ids
    is_same_path = np.array_equal(tree.path_ids(node)[: node.sampled_start], path_ids)
    if not is_same_path or call.requested_config_digest != turn.request.prompt_config_digest:
        raise SessionError("conflict", f"resume: call {call.id} had another prompt than this one")


def replay_partial(
    builder: AnswerBuilder, chunks: Sequence[Chunk], params: SamplingParams, prompt_ids: Ids
) -> tuple[list[AnswerDelta], Ids, SamplingParams]:
    """Feeds earlier chunks to a builder.

    Returns their deltas, and the prompt and parameters to sample the rest; `max_tokens` is 0 without a rest.
    """
    deltas: list[AnswerDelta] = []
    for chunk in chunks:
        deltas.append(builder.add(chunk))
        if builder.is_stopped:
            break
    ids = np.concatenate([chunk.ids for chunk in builder.chunks])
    rest = params.for_continuation(len(ids))
    has_stop_id = len(ids) > 0 and int(ids[-1]) in params.stop_ids
    is_complete = builder.is_stopped or chunks[-1].finish_reason is not None
    if not is_complete and (has_stop_id or rest.max_tokens <= 0):
        deltas.append(builder.add(Chunk(finish_reason="stop" if has_stop_id else "length")))
        is_complete = True
    if is_complete:
        rest = params.for_continuation(params.max_tokens)
    return deltas, as_ids(np.concatenate((prompt_ids, ids))), rest
