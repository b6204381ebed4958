"""Responses that a client reads again by their id (`GET /v1/responses/{id}`).

The latest ones are kept as they were answered, up to a limit for all sessions together. Any other is made
from its call in the session's tree: its output, status and token counts. What the tree does not have (the
model's name, the time, the fields that a response repeats from its request) is null there, and
`from_record` is true.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import msgspec

from branchline.chat.base import Codec
from branchline.core.call import Request
from branchline.core.token_arrays import NO_IDS
from branchline.engines.base import SamplingParams
from branchline.gateway.protocols.responses import ECHOED_DEFAULTS
from branchline.gateway.protocols.responses_input import ResponseHistory
from branchline.gateway.protocols.responses_output import ResponsesRequest, build_response
from branchline.runtime.answer import Answer
from branchline.runtime.call_record import CallRequest, CallResult
from branchline.runtime.managed_session import ManagedSession
from branchline.tree.tree import Node, Tree

_MAX_BYTES = 32 * 2**20
_NOT_RECORDED = ("created_at", "completed_at", "model", "temperature", "top_p", *ECHOED_DEFAULTS)


class StoredResponses:
    """The responses of a gateway; the latest ones as they were answered."""

    def __init__(self, max_bytes: int = _MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._encoded: OrderedDict[tuple[str, float, str], bytes] = OrderedDict()
        """By session and id, oldest first. The id of a session may be used again, so its time is included."""

    def add(self, managed: ManagedSession, response: dict[str, Any]) -> None:
        """Keeps a response; the oldest ones make room."""
        encoded = msgspec.json.encode(response)
        self._encoded[managed.id, managed.created_at, response["id"]] = encoded
        self._bytes += len(encoded)
        while self._bytes > self._max_bytes:
            _, oldest = self._encoded.popitem(last=False)
            self._bytes -= len(oldest)

    def find(self, managed: ManagedSession, response_id: str) -> object | None:
        """Returns a response of a session, None if it has no such response."""
        encoded = self._encoded.get((managed.id, managed.created_at, response_id))
        if encoded is not None:
            return msgspec.Raw(encoded)
        tree = managed.session.tree
        node = ResponseHistory(tree).output_node(response_id)
        return None if node is None else _recorded_response(tree, node, managed.session.codec)


def _recorded_response(tree: Tree, node: Node, codec: Codec) -> dict[str, Any]:
    """A response as far as a tree has it."""
    call, output = tree.call_of(node), node.output
    assert output is not None
    ids = NO_IDS if node.sampled_ids is None else node.sampled_ids
    result = CallResult(
        call.id,
        NO_IDS,
        [Answer(node.message, output.finish_reason, ids)],
        call.prompt_tokens,
        len(ids),
        call.encoded_tokens,
        max(0, call.prompt_tokens - call.encoded_tokens),
    )
    parsed = ResponsesRequest(CallRequest(Request(()), SamplingParams()), "")
    response = build_response(parsed, result, codec) | dict.fromkeys(_NOT_RECORDED)
    if output.finish_reason == "cancelled":
        response["status"] = "cancelled"
    sampling = {name: call.sampling.get(name) for name in ("temperature", "top_p")}
    return {**response, **sampling, "from_record": True}
