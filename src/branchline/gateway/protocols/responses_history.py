"""What a session has said before, by the ids that the Responses protocol gives it.

The id of an item names its response, so what comes back can be put together and looked up. A response is a
call of the session's tree and is called what that is called, with `resp_` before it unless its client has
named it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

from branchline.core.call import RAW_PROMPT_DIGEST, Call
from branchline.core.errors import MessageError
from branchline.core.message import Message
from branchline.gateway.protocols.vendor_tools import OPENAI_TOOLS
from branchline.tree.tree import Node, Tree

RESPONSE_ID_PREFIX = "resp_"
_ITEM_ID = re.compile(r"([a-z]+)_(.+)_([0-9]{1,6})")
_ITEM_PREFIXES = frozenset({"msg", "rs", "fc", "ctc", *(tool.id_prefix for tool in OPENAI_TOOLS.values())})
_GENERATED_ID = re.compile(r"[0-9a-f]+")
"""What the ids of responses look like that no client has named."""


def item_id(prefix: str, call_id: str, number: int) -> str:
    """The id of an item of a response: it names the response, so what comes back can be put together."""
    return f"{prefix}_{call_id.removeprefix(RESPONSE_ID_PREFIX)}_{number}"


@dataclass(frozen=True)
class ResponseHistory:
    """The answers of a session, by response id."""

    tree: Tree

    @cached_property
    def _calls_by_id(self) -> dict[str, Call]:
        return {call.id: call for call in self.tree.calls}

    def parse_item_id(self, given: str) -> tuple[str, str, int]:
        """The prefix, the response and the number of an item of ours; empty where it is somebody else's."""
        found = _ITEM_ID.fullmatch(given)
        if found is None or found[1] not in _ITEM_PREFIXES:
            return "", "", 0
        prefix, name, number = found[1], found[2], int(found[3])
        for response_id in (RESPONSE_ID_PREFIX + name, name):
            if response_id in self._calls_by_id:
                return prefix, response_id, number
        # What another session has made is known by its looks.
        return (prefix, RESPONSE_ID_PREFIX + name, number) if _GENERATED_ID.fullmatch(name) else ("", "", 0)

    def output_node(self, response_id: str) -> Node | None:
        """Where a response ended, if it is one of this session's."""
        call = self._calls_by_id.get(response_id)
        return (
            None
            if call is None or call.prompt_config_digest == RAW_PROMPT_DIGEST
            else self.tree.nodes[call.outputs[0]]
        )

    def messages_through(self, response_id: object) -> list[Message]:
        """All that was said up to a response and in it, without its instructions."""
        node = self.output_node(response_id) if isinstance(response_id, str) else None
        if node is None:
            raise MessageError("previous_response_id", response_id, "the id of a response of this session")
        messages = [entry.message for entry in node.path()]
        return messages[1:] if self.tree.call_of(node).has_instructions else messages
