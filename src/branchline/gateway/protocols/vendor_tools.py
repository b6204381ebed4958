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

_TEXT = {"type": "string"}
_NUMBER = {"type": "integer"}
_TEXTS = {"type": "array", "items": _TEXT}
_RANGE = {"type": "array", "items": _NUMBER, "description": "The first and the last line to show."}


def _nothing(_arguments: str) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class VendorTool:
    """One of them. The Responses protocol has an item of its own for calls of each."""

    description: str
    properties: Mapping[str, Any]
    required: tuple[str, ...]
    item: str = ""
    """The type of that item."""
    prefix: str = ""
    """What the ids of such items begin with."""
    place: str = ""
    """The field in which it has what the tool is called with."""
    constant: Mapping[str, Any] = field(default_factory=dict)
    """What stands there always, or where nothing else is said."""
    otherwise: Callable[[str], dict[str, Any]] = _nothing
    """What arguments become that are not what it takes: something that whoever runs it can say no to."""

    def function(self, name: str) -> dict[str, Any]:
        """The tool as Chat Completions writes it."""
        properties, required = dict(self.properties), list(self.required)
        schema = {"type": "object", "properties": properties, "required": required}
        shape = {"name": name, "description": self.description, "parameters": schema}
        return {"type": "function", "function": shape}

    def write(self, arguments: str) -> dict[str, Any]:
        """The arguments a model wrote, as an item has them."""
        try:
            value = msgspec.json.decode(arguments)
        except (msgspec.DecodeError, RecursionError):
            value = None
        fits = isinstance(value, dict) and all(self._is_given(value, name) for name in self.required)
        return {**self.constant, **(value if fits else self.otherwise(arguments))}

    def _is_given(self, value: Mapping[str, Any], name: str) -> bool:
        said = value.get(name)
        texts = said if self.properties[name]["type"] == "array" else [said]
        return isinstance(texts, list) and all(isinstance(text, str) for text in texts)

    def read(self, value: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments that such an item stands for."""
        return {
            name: said for name, said in given(value).items() if name != "type" or "type" in self.properties
        }


def given(value: Mapping[str, Any]) -> dict[str, Any]:
    """What clients really said: they write null, and empty objects, where there is nothing."""
    return {name: said for name, said in value.items() if said is not None and said != {}}


OPENAI: dict[str, VendorTool] = {
    "local_shell": VendorTool(
        "Runs a command on the local machine.",
        {
            "command": {**_TEXTS, "description": "The program and its arguments."},
            "working_directory": _TEXT,
            "timeout_ms": _NUMBER,
            "env": {"type": "object", "additionalProperties": _TEXT},
            "user": _TEXT,
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
            "commands": {**_TEXTS, "description": "Command lines, each run by itself."},
            "timeout_ms": _NUMBER,
            "max_output_length": _NUMBER,
        },
        ("commands",),
        "shell_call",
        "sh",
        "action",
        otherwise=lambda text: {"commands": [text]},
    ),
    "apply_patch": VendorTool(
        "Creates, changes or deletes a file.",
        {
            "type": {"type": "string", "enum": ["create_file", "update_file", "delete_file"]},
            "path": _TEXT,
            "diff": {**_TEXT, "description": "What to change, as a diff; not needed to delete."},
        },
        ("type", "path"),
        "apply_patch_call",
        "apc",
        "operation",
        otherwise=lambda text: {"type": "update_file", "path": "", "diff": text},
    ),
}
"""By the type of the tool."""
BY_ITEM = {tool.item: (name, tool) for name, tool in OPENAI.items()}

_EDITS: dict[str, Any] = {
    "path": {**_TEXT, "description": "The file or folder."},
    "view_range": _RANGE,
    "file_text": {**_TEXT, "description": "For create: what the file is to hold."},
    "old_str": {**_TEXT, "description": "For str_replace: what is there now, exactly."},
    "new_str": {**_TEXT, "description": "For str_replace: what is to be there."},
    "insert_line": {**_NUMBER, "description": "For insert: the line behind which, 0 for the beginning."},
    "insert_text": {**_TEXT, "description": "For insert: what to put there."},
}


def _command(*commands: str) -> dict[str, Any]:
    return {"type": "string", "enum": list(commands)}


_ANTHROPIC = {
    "bash": VendorTool(
        "Runs commands in a bash shell that stays open.",
        {
            "command": {**_TEXT, "description": "What to run; not needed to restart."},
            "restart": {"type": "boolean", "description": "True for a new shell."},
        },
        (),
    ),
    "text_editor": VendorTool(
        "Shows and changes files.",
        {"command": _command("view", "create", "str_replace", "insert"), **_EDITS},
        ("command", "path"),
    ),
    "memory": VendorTool(
        "Keeps notes in files under /memories.",
        {
            "command": _command("view", "create", "str_replace", "insert", "delete", "rename"),
            **_EDITS,
            "old_path": {**_TEXT, "description": "For rename."},
            "new_path": {**_TEXT, "description": "For rename."},
        },
        ("command",),
    ),
}
_DATED = re.compile(r"(.+)_[0-9]{8}")


def anthropic_tool(kind: str) -> VendorTool | None:
    """The tool of a dated type of Anthropic's.

    >>> anthropic_tool("bash_20250124").required, anthropic_tool("web_search_20250305")
    ((), None)
    """
    found = _DATED.fullmatch(kind)
    return _ANTHROPIC.get(found[1]) if found else None


@lru_cache(maxsize=256)
def note_left_out(kind: str) -> None:
    """Says, once, that a type of tools is not offered to the model."""
    log.warning(
        "tools of type %s are not offered: they run on their vendor's servers, or are not known", kind
    )
