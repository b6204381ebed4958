"""What a request asks for, and nobody does: accepted, not applied.

Some wishes cannot be followed here and cannot be refused either, because real clients send them with every
request (Claude Code `context_management`, Codex `reasoning.effort`). Their names are recorded with the call,
counted in the views of a session and in the report of an export, in logs and in metrics.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from branchline.core.call import ToolList
from branchline.runtime.call_record import CallRequest

log = logging.getLogger("branchline.gateway")

_NOTHING_ASKED: Mapping[str, tuple[Any, ...]] = {
    "truncation": ("disabled",),
    "thinking": ({"type": "disabled"},),
    "context_management": ({}, [], {"edits": []}),
    "container": ("",),
    "fallbacks": ([],),
}
"""Values of fields that are what happens without the field."""
_APPLIED_PARTS: Mapping[str, frozenset[str]] = {
    "reasoning": frozenset({"summary", "generate_summary"}),
    "text": frozenset({"format"}),
    "output_config": frozenset({"format"}),
}
"""Parts of object fields that are done; their other parts are counted one by one."""
APPLIED_BY_UPSTREAMS = frozenset(
    {
        "reasoning.effort",
        "output_config.effort",
        "text.verbosity",
        "tool_choice",
        "tools.strict",
        "top_logprobs",
    }
)
"""What an upstream gets of a request in another protocol than its own."""
_MAX_NAMES = 64
_MAX_NAME_CHARACTERS = 80
"""Clients choose the names of parts and of vendors' tools."""

_logged_names: set[str] = set()


def not_applied_fields(call_request: CallRequest, applied: Collection[str] = ()) -> list[str]:
    """Returns the names of what a request asks for and nobody does, apart from what is `applied`."""
    names = {*call_request.not_applied, *call_request.ignored_fields, *_names(call_request.requested)}
    if call_request.tool_choice not in (None, "none"):
        names.add("tool_choice")
    tools = call_request.request.tools
    if (tools if isinstance(tools, ToolList) else ToolList(map(dict, tools))).has_strict_tools:
        names.add("tools.strict")
    found = sorted({name[:_MAX_NAME_CHARACTERS] for name in names} - set(applied))[:_MAX_NAMES]
    _log_once(found)
    return found


def _names(requested: Mapping[str, Any]) -> Iterator[str]:
    for name, value in requested.items():
        parts = _APPLIED_PARTS.get(name)
        if parts is not None and isinstance(value, dict):
            yield from (
                f"{name}.{part}" for part, asked in value.items() if part not in parts and asked is not None
            )
        elif value not in _NOTHING_ASKED.get(name, ()):
            yield name


def _log_once(names: Iterable[str]) -> None:
    """Logs each name, once in a process."""
    for name in names:
        if name not in _logged_names and len(_logged_names) < 1000:
            _logged_names.add(name)
            log.warning("%s: a request asks for this; it is accepted and not applied", name)
