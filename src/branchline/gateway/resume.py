"""Going on where a cancelled call stopped, behind the very ids it had sampled.

What a cancelled call sampled is in the tree. A request that names it (`x-branchline-resume`) begins with
those ids and samples the rest; the new call then holds the whole answer and the old one counts no more: its
tokens are in the new one, with their logprobs and versions. A call that left nothing behind is begun again.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from branchline.core.call import Call, Delivery
from branchline.core.errors import MessageError, SessionError
from branchline.core.runs import Ids, as_ids
from branchline.engines.base import Chunk, SamplingParams
from branchline.gateway.answers import Choice, Said
from branchline.gateway.live import LiveSession
from branchline.tree.tree import Turn


async def left_by(live: LiveSession, turn: Turn, choices: int) -> list[Chunk]:
    """What the call that a turn goes on from had sampled, a chunk for each policy version."""
    call_id = turn.request.resumes
    if not call_id:
        return []
    if choices != 1:
        raise MessageError("n", choices, "1: one answer was begun and one goes on")
    running = live.running.get(call_id)
    if running is not None:
        # Its client has just left; what it had is on the way into the tree.
        await running.wait()
    tree = live.session.tree
    call = tree.find_call(call_id)
    if call is None:
        return []
    _check(live, turn, call)
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
    return chunks


def _check(live: LiveSession, turn: Turn, call: Call) -> None:
    tree = live.session.tree
    if tree.delivery(call) != Delivery.CANCELLED or len(call.outputs) != 1:
        raise SessionError("conflict", f"resume: call {call.id} is no cancelled call with one answer")
    if tree.is_resumed(call):
        raise SessionError("conflict", f"resume: call {call.id} was resumed already")
    node = tree.nodes[call.outputs[0]]
    if not np.array_equal(tree.path_ids(node)[: node.sampled_start], turn.prompt_ids):
        raise SessionError("conflict", f"resume: call {call.id} had another prompt than this one")


def take_up(
    choice: Choice, chunks: Sequence[Chunk], params: SamplingParams, prompt_ids: Ids
) -> tuple[list[Said], Ids, SamplingParams]:
    """Feeds a choice what was there before; the rest is asked for behind it, if there is a rest."""
    said: list[Said] = []
    for chunk in chunks:
        said.append(choice.take(chunk))
        if choice.ended:
            break
    ids = choice.ids
    left = params.continued(len(ids))
    stopped = choice.ended or (len(ids) > 0 and int(ids[-1]) in params.stop_ids)
    if stopped or left.max_tokens <= 0:
        if not choice.ended:
            said.append(choice.take(Chunk(finish="stop" if stopped else "length")))
        left = params.continued(params.max_tokens)
    return said, as_ids(np.concatenate((prompt_ids, ids))), left
