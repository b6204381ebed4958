"""Vendors' own tools that the client runs itself, shown to the model as functions.

A vendor's model knows the inputs of these tools; other models get their documented schemas here. Tools that
run on a vendor's servers (web search, a hosted shell) cannot be run here and are not offered to the model; a
warning names each such type once.
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
    """A tool, and the item type that the Responses protocol has for calls of it."""

    description: str
    properties: Mapping[str, Any]
    required: tuple[str, ...]
    item_type: str = ""
    id_prefix: str = ""
    """The prefix of such items' ids."""
    arguments_field: str = ""
    """The item's field with the arguments."""
    default_arguments: Mapping[str, Any] = field(default_factory=dict)
    """Values in that field if the model wrote none."""
    fallback_arguments: Callable[[str], dict[str, Any]] = _no_arguments
    """Makes valid arguments from a text that does not fit the schema; the client can then refuse them."""

    def to_function(self, name: str) -> dict[str, Any]:
        """The tool as a Chat Completions function."""
        schema = {
            "type": "object",
            "properties": dict(self.properties),
            "required": list(self.required),
        }
        function = {"name": name, "description": self.description, "parameters": schema}
        return {"type": "function", "function": function}

    def to_item(self, arguments: str) -> dict[str, Any]:
        """The arguments that a model wrote, as the value of an item's field."""
        try:
            value = msgspec.json.decode(arguments)
        except (msgspec.DecodeError, RecursionError):
            value = None
        fits = isinstance(value, dict) and all(self._is_valid(value, name) for name in self.required)
        return {**self.default_arguments, **(value if fits else self.fallback_arguments(arguments))}

    def _is_valid(self, value: Mapping[str, Any], name: str) -> bool:
        argument = value.get(name)
        texts = argument if self.properties[name]["type"] == "array" else [argument]
        return isinstance(texts, list) and all(isinstance(text, str) for text in texts)

    def from_item(self, value: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments in the value of an item's field."""
        return {
            name: argument
            for name, argument in drop_empty(value).items()
            if name != "type" or "type" in self.properties
        }


def drop_empty(value: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that are set: clients write null and empty objects for absent ones."""
    return {name: field_value for name, field_value in value.items() if field_value not in (None, {})}


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
"""OpenAI's tools by their type."""
TOOLS_BY_ITEM_TYPE = {tool.item_type: (name, tool) for name, tool in OPENAI_TOOLS.items()}

_EDIT_PROPERTIES: dict[str, Any] = {
    "path": {**_STRING, "description": "The file or folder."},
    "view_range": _RANGE,
    "file_text": {**_STRING, "description": "For create: the content of the file."},
    "old_str": {**_STRING, "description": "For str_replace: the exact text to replace."},
    "new_str": {**_STRING, "description": "For str_replace: the new text."},
    "insert_line": {
        **_INTEGER,
        "description": "For insert: insert after this line, 0 for the beginning.",
    },
    "insert_text": {**_STRING, "description": "For insert: the text to insert."},
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
    """Anthropic's tool of a dated type; None if the client cannot run it.

    >>> anthropic_tool("bash_20250124").required, anthropic_tool("web_search_20250305")
    ((), None)
    """
    found = _DATED_TYPE.fullmatch(kind)
    return _ANTHROPIC_TOOLS.get(found[1]) if found else None


@lru_cache(maxsize=256)
def warn_unsupported_tool(kind: str) -> None:
    """Warns, once per type, that tools of this type are not offered to the model."""
    log.warning(
        "tools of type %s are not offered: they run on their vendor's servers, or are not known", kind
    )
