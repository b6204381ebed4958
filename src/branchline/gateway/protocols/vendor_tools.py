"""Vendors' own tools that the client runs itself, shown to a model as functions.

A vendor's model knows what they take; any other has to be told, and is: these are their documented inputs.
Tools that run on a vendor's own servers (web search, a hosted shell) nobody here could run, so they are not
offered. What is left out is said once in the log, by its type.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import msgspec

log = logging.getLogger("branchline.gateway")

_STRING = {"type": "string"}
_INTEGER = {"type": "integer"}
_STRINGS = {"type": "array", "items": _STRING}
_RANGE = {"type": "array", "items": _INTEGER, "description": "The first and the last line to show."}


def _no_arguments(_arguments: str) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class VendorTool:
    """One of them. The Responses protocol has an item of its own for calls of each."""

    description: str
    properties: Mapping[str, Any]
    required: tuple[str, ...]
    item_type: str = ""
    """The type of that item."""
    id_prefix: str = ""
    """What the ids of such items begin with."""
    arguments_field: str = ""
    """The field in which it has what the tool is called with."""
    default_arguments: Mapping[str, Any] = field(default_factory=dict)
    """What stands there always, or where nothing else is said."""
    fallback_arguments: Callable[[str], dict[str, Any]] = _no_arguments
    """What arguments become that are not what it takes: something that whoever runs it can say no to."""

    def to_function(self, name: str) -> dict[str, Any]:
        """The tool as Chat Completions writes it."""
        properties, required = dict(self.properties), list(self.required)
        schema = {"type": "object", "properties": properties, "required": required}
        shape = {"name": name, "description": self.description, "parameters": schema}
        return {"type": "function", "function": shape}

    def to_item(self, arguments: str) -> dict[str, Any]:
        """The arguments a model wrote, as an item has them."""
        try:
            value = msgspec.json.decode(arguments)
        except (msgspec.DecodeError, RecursionError):
            value = None
        fits = isinstance(value, dict) and all(self._is_valid(value, name) for name in self.required)
        return {**self.default_arguments, **(value if fits else self.fallback_arguments(arguments))}

    def _is_valid(self, value: Mapping[str, Any], name: str) -> bool:
        said = value.get(name)
        texts = said if self.properties[name]["type"] == "array" else [said]
        return isinstance(texts, list) and all(isinstance(text, str) for text in texts)

    def from_item(self, value: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments that such an item stands for."""
        return {
            name: said
            for name, said in drop_empty(value).items()
            if name != "type" or "type" in self.properties
        }


def drop_empty(value: Mapping[str, Any]) -> dict[str, Any]:
    """What clients really said: they write null, and empty objects, where there is nothing."""
    return {name: said for name, said in value.items() if said is not None and said != {}}


OPENAI_TOOLS: dict[str, VendorTool] = {
    "local_shell": VendorTool(
        "Runs a command on the local machine.",
        {
            "command": {**_STRINGS, "description": "The program and its arguments."},
            "working_directory": _STRING,
            "timeout_ms": _INTEGER,
            "env": {"type": "object", "additionalProperties": _STRING},
            "user": _STRING,
        },
        ("command",),
        "local_shell_call",
        "lsh",
        "action",
        {"type": "exec", "env": {}},
        lambda text: {"command": [text]},
    ),
    "shell": VendorTool(
        "Runs commands in a shell.",
        {
            "commands": {**_STRINGS, "description": "Command lines, each run by itself."},
            "timeout_ms": _INTEGER,
            "max_output_length": _INTEGER,
        },
        ("commands",),
        "shell_call",
        "sh",
        "action",
        fallback_arguments=lambda text: {"commands": [text]},
    ),
    "apply_patch": VendorTool(
        "Creates, changes or deletes a file.",
        {
            "type": {"type": "string", "enum": ["create_file", "update_file", "delete_file"]},
            "path": _STRING,
            "diff": {**_STRING, "description": "What to change, as a diff; not needed to delete."},
        },
        ("type", "path"),
        "apply_patch_call",
        "apc",
        "operation",
        fallback_arguments=lambda text: {"type": "update_file", "path": "", "diff": text},
    ),
}
"""By the type of the tool."""
TOOLS_BY_ITEM_TYPE = {tool.item_type: (name, tool) for name, tool in OPENAI_TOOLS.items()}

_EDIT_PROPERTIES: dict[str, Any] = {
    "path": {**_STRING, "description": "The file or folder."},
    "view_range": _RANGE,
    "file_text": {**_STRING, "description": "For create: what the file is to hold."},
    "old_str": {**_STRING, "description": "For str_replace: what is there now, exactly."},
    "new_str": {**_STRING, "description": "For str_replace: what is to be there."},
    "insert_line": {**_INTEGER, "description": "For insert: the line behind which, 0 for the beginning."},
    "insert_text": {**_STRING, "description": "For insert: what to put there."},
}


def _command_schema(*commands: str) -> dict[str, Any]:
    return {"type": "string", "enum": list(commands)}


_ANTHROPIC_TOOLS = {
    "bash": VendorTool(
        "Runs commands in a bash shell that stays open.",
        {
            "command": {**_STRING, "description": "What to run; not needed to restart."},
            "restart": {"type": "boolean", "description": "True for a new shell."},
        },
        (),
    ),
    "text_editor": VendorTool(
        "Shows and changes files.",
        {"command": _command_schema("view", "create", "str_replace", "insert"), **_EDIT_PROPERTIES},
        ("command", "path"),
    ),
    "memory": VendorTool(
        "Keeps notes in files under /memories.",
        {
            "command": _command_schema("view", "create", "str_replace", "insert", "delete", "rename"),
            **_EDIT_PROPERTIES,
            "old_path": {**_STRING, "description": "For rename."},
            "new_path": {**_STRING, "description": "For rename."},
        },
        ("command",),
    ),
}
_DATED_TYPE = re.compile(r"(.+)_[0-9]{8}")


def anthropic_tool(kind: str) -> VendorTool | None:
    """The tool of a dated type of Anthropic's.

    >>> anthropic_tool("bash_20250124").required, anthropic_tool("web_search_20250305")
    ((), None)
    """
    found = _DATED_TYPE.fullmatch(kind)
    return _ANTHROPIC_TOOLS.get(found[1]) if found else None


@lru_cache(maxsize=256)
def warn_unsupported_tool(kind: str) -> None:
    """Says, once, that a type of tools is not offered to the model."""
    log.warning(
        "tools of type %s are not offered: they run on their vendor's servers, or are not known", kind
    )
