"""The tools of an agent that edits its context: documents, notes, budget, deletion.

A tool changes the ContextState of its trajectory in one step without an await, and returns its result in the
same step. So a call that was cancelled has either its effect and its result, or neither, and can run again.
Calls of one turn take effect in the order in which the model made them. Work that takes long runs in a
thread. Results are JSON objects; the text of an error is shown to the model.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

import msgspec

from branchline.core.errors import InputError
from branchline.loop.context.context_state import ContextState, EditEffect, IndexConfig
from branchline.loop.context.documents import DocumentIndex, open_index
from branchline.loop.model import Model
from branchline.loop.state import LoopState
from branchline.loop.task import LoopLimits
from branchline.loop.timeouts import run_in_thread
from branchline.loop.tools.base import BaseTool, ToolResult, function_schema

_CHARACTERS_PER_TOKEN = 4
"""The estimate if the model's codec is not known here."""
Arguments = Mapping[str, Any]


class ContextWorkspace:
    """What the tools of one trajectory work on: its state, its documents, its budget."""

    def __init__(self, state: LoopState, model: Model, limits: LoopLimits) -> None:
        if state.context is None:
            state.context = ContextState()
        self.context: ContextState = state.context
        self.lock = asyncio.Lock()
        """Held by one call at a time; waiting calls get it in the order in which they were made."""
        self._state = state
        self._model = model
        self._limits = limits
        self._index: tuple[IndexConfig, DocumentIndex] | None = None
        self._document_tokens: dict[str, int] = {}

    # -- documents -----------------------------------------------------------------------------------

    async def analyze_text(self, arguments: Arguments) -> dict[str, Any]:
        name, text = self._document(arguments.get("file_name"))
        return {"file_name": name, "total_tokens": await self._count_document(name, text)}

    async def load_document(self, arguments: Arguments) -> dict[str, Any]:
        name, text = self._document(arguments.get("file_name"))
        available = self.available_tokens
        if available is not None and await self._count_document(name, text) >= available:
            raise InputError(
                f"{name!r} has {self._document_tokens[name]} tokens and {available} are available, "
                "expected a document that fits: use buildIndex and readChunk"
            )
        return {"file_name": name, "content": text}

    async def build_index(self, arguments: Arguments) -> dict[str, Any]:
        name, text = self._document(arguments.get("file_name"))
        number = self.context.index_count + 1
        config = IndexConfig(f"index_{number}", name, arguments["chunk_size"], arguments.get("overlap", 0))
        index = await run_in_thread(self._open_index, config, text)
        self._index, self.context.index, self.context.index_count = (config, index), config, number
        self.context.scanned_chunks = []
        return {
            "index_id": config.index_id,
            "total_chunks": len(index),
            "first_chunk_id": 0,
            "last_chunk_id": len(index) - 1,
        }

    async def read_chunk(self, arguments: Arguments) -> dict[str, Any]:
        index, chunk_id = await self._open_current_index(), arguments["chunk_id"]
        if not 0 <= chunk_id < len(index):
            raise InputError(f"chunk_id: got {chunk_id}, expected 0 to {len(index) - 1}")
        result = {"retrieved_chunk": index.read(chunk_id), "chunk_id": chunk_id}
        if arguments.get("enable_scan"):
            scanned = self.context.scanned_chunks
            if chunk_id not in scanned:
                scanned.append(chunk_id)
            unread = next((one for one in range(len(index)) if one not in set(scanned)), None)
            result["reading_progress"] = {
                "read_chunks": len(scanned),
                "total_chunks": len(index),
                "next_chunk_id": unread,
            }
        return result

    async def search(self, arguments: Arguments) -> dict[str, Any]:
        index = await self._open_current_index()
        hits = await run_in_thread(index.search, arguments["keyword"])
        found = [
            {"chunk_id": hit.chunk_id, "relevance_score": hit.relevance_score, "highlights": hit.highlights}
            for hit in hits
        ]
        return {"retrieved_chunks": found}

    def _document(self, name: str | None) -> tuple[str, str]:
        documents = self._state.task.documents
        if not documents:
            raise InputError("file_name: the task has no document, expected a task with documents")
        if name is None:
            name = next(iter(documents))
        if name not in documents:
            raise InputError(f"file_name: got {name!r}, expected one of {list(documents)}")
        return name, documents[name]

    async def _count_document(self, name: str, text: str) -> int:
        if name not in self._document_tokens:
            self._document_tokens[name] = await run_in_thread(self._count_tokens, text)
        return self._document_tokens[name]

    def _count_tokens(self, text: str) -> int:
        codec = self._model.codec
        return len(codec.encode(text)) if codec is not None else -(-len(text) // _CHARACTERS_PER_TOKEN)

    def _open_index(self, config: IndexConfig, text: str) -> DocumentIndex:
        return open_index(text, config.chunk_size, config.overlap, self._count_tokens)

    async def _open_current_index(self) -> DocumentIndex:
        config = self.context.index
        if config is None:
            raise InputError("there is no index, expected a call of buildIndex before this one")
        if self._index is None or self._index[0] != config:
            # The trajectory was resumed.
            text = self._state.task.documents[config.file_name]
            self._index = config, await run_in_thread(self._open_index, config, text)
        return self._index[1]

    # -- notes ---------------------------------------------------------------------------------------

    async def add_note(self, arguments: Arguments) -> dict[str, Any]:
        self.context.add_note(arguments["key"], arguments["summary"], arguments["content"])
        return {"status": "success", "key": arguments["key"]}

    async def read_note(self, arguments: Arguments) -> dict[str, Any]:
        if arguments.get("key") is None:
            return {"notes": {key: note.summary for key, note in self.context.notes.items()}}
        note = self.context.find_note(arguments["key"])
        return {"summary": note.summary, "full_content": note.content}

    async def update_note(self, arguments: Arguments) -> dict[str, Any]:
        key, mode = arguments["key"], arguments["mode"]
        self.context.update_note(key, mode, arguments.get("content"), arguments.get("summary"))
        return {"status": "success", "key": key}

    # -- context -------------------------------------------------------------------------------------

    @property
    def available_tokens(self) -> int | None:
        """Tokens that are left in the model's context after the last answer; None without a limit."""
        length = self._limits.model_length
        return None if length is None else max(0, length - self._state.tokens)

    async def check_budget(self, arguments: Arguments) -> dict[str, Any]:
        turns, limit = self._state.assistant_turns, self._limits.max_assistant_turns
        return {
            "conv_rounds": turns,
            "available_tokens": self.available_tokens,
            "available_rounds": None if limit is None else max(0, limit - turns),
        }

    async def delete(self, arguments: Arguments) -> dict[str, Any]:
        message_ids = list(arguments.get("message_ids") or ())
        if "msg_id" in arguments:
            message_ids.append(arguments["msg_id"])
        deleted = self.context.delete(self._state.messages, message_ids)
        return self._edit_result("deleted", EditEffect(deleted, ()))

    async def undo(self, arguments: Arguments) -> dict[str, Any]:
        return self._edit_result("restored", self.context.undo())

    async def redo(self, arguments: Arguments) -> dict[str, Any]:
        return self._edit_result("deleted", self.context.redo())

    def _edit_result(self, verb: str, effect: EditEffect) -> dict[str, Any]:
        """Ids and roles: single values for one message, lists for several."""
        message_ids = effect.changed
        roles: list[str] = [self._state.messages[message_id].role for message_id in message_ids]
        is_single = len(message_ids) == 1
        result = {
            "status": "success",
            f"{verb}_msg_id": message_ids[0] if is_single else message_ids,
            f"{verb}_role": roles[0] if is_single else roles,
        }
        return {**result, "compacted_msg_ids": effect.compacted} if effect.compacted else result

    async def finish(self, arguments: Arguments) -> dict[str, Any]:
        self.context.finish(arguments["answer"])
        return {"final_answer": arguments["answer"]}


_Operation = Callable[[ContextWorkspace, Arguments], Awaitable[dict[str, Any]]]


class ContextTool(BaseTool):
    """A tool on the workspace of one trajectory."""

    is_repeatable = True

    def __init__(self, schema: Mapping[str, Any], operation: _Operation, workspace: ContextWorkspace) -> None:
        self.name = schema["function"]["name"]
        self.schema = schema
        self._operation = operation
        self._workspace = workspace

    @property
    def is_stateful(self) -> bool:
        """False: all state is in the LoopState."""
        return False

    async def execute(self, instance: Any, arguments: Arguments) -> ToolResult:
        async with self._workspace.lock:
            fields = await self._operation(self._workspace, arguments)
            return ToolResult(msgspec.json.encode(fields).decode())


def _define(
    name: str,
    operation: _Operation,
    description: str,
    properties: Mapping[str, Any] | None = None,
    required: Iterable[str] = (),
) -> tuple[dict[str, Any], _Operation]:
    parameters = {
        "type": "object",
        "properties": dict(properties or {}),
        "required": list(required),
        "additionalProperties": False,
    }
    return function_schema(name, description, parameters), operation


def _text(description: str) -> dict[str, Any]:
    return {"type": "string", "description": description}


def _integer(description: str, minimum: int = 0) -> dict[str, Any]:
    return {"type": "integer", "minimum": minimum, "description": description}


_FILE_NAME = {"file_name": _text("The document; the first one if it is not given.")}
_MESSAGE_IDS = {"type": "array", "items": {"type": "integer"}, "description": "Ids of several messages."}
_DEFINITIONS = {
    schema["function"]["name"]: (schema, operation)
    for schema, operation in (
        _define(
            "analyzeText", ContextWorkspace.analyze_text, "Returns the length of a document.", _FILE_NAME
        ),
        _define(
            "loadDocument",
            ContextWorkspace.load_document,
            "Returns a whole document. Use it only for a short one.",
            _FILE_NAME,
        ),
        _define(
            "buildIndex",
            ContextWorkspace.build_index,
            "Splits a document into chunks that readChunk reads and searchEngine searches.",
            {
                "chunk_size": _integer("The length of a chunk in tokens.", 1),
                "overlap": _integer("Tokens that a chunk repeats of the one before it; 0 if not given."),
                **_FILE_NAME,
            },
            ["chunk_size"],
        ),
        _define(
            "readChunk",
            ContextWorkspace.read_chunk,
            "Returns a chunk of the indexed document.",
            {
                "chunk_id": _integer("The chunk, from 0."),
                "enable_scan": {
                    "type": "boolean",
                    "description": "Also returns how much was read this way, and what is next.",
                },
            },
            ["chunk_id"],
        ),
        _define(
            "searchEngine",
            ContextWorkspace.search,
            "Returns the chunks that contain these words, the most relevant first, at most 20.",
            {"keyword": _text("The words to look for.")},
            ["keyword"],
        ),
        _define(
            "note",
            ContextWorkspace.add_note,
            "Writes a note. Notes are kept when messages are deleted.",
            {
                "key": _text("A name for the note."),
                "summary": _text("What the note is about."),
                "content": _text("The note."),
            },
            ["key", "summary", "content"],
        ),
        _define(
            "readNote",
            ContextWorkspace.read_note,
            "Returns a note, or the summaries of all notes if no key is given.",
            {"key": _text("The name of the note.")},
        ),
        _define(
            "updateNote",
            ContextWorkspace.update_note,
            "Changes or deletes a note.",
            {
                "key": _text("The name of the note."),
                "mode": {"type": "string", "enum": ["append", "overwrite", "delete"]},
                "content": _text("The text to append, or the new text."),
                "summary": _text("A new summary; the old one stays if it is not given."),
            },
            ["key", "mode"],
        ),
        _define(
            "checkBudget",
            ContextWorkspace.check_budget,
            "Returns how many tokens and rounds are left.",
        ),
        _define(
            "deleteContext",
            ContextWorkspace.delete,
            "Deletes earlier messages from the context, by `msg_id` or `msg_id(invoking_assistant)` of a "
            "tool result. Deleted messages are shown as stubs.",
            {"message_ids": _MESSAGE_IDS, "msg_id": _integer("The id of one message.")},
        ),
        _define("undoDelete", ContextWorkspace.undo, "Restores the messages of the last deletion."),
        _define("redoDelete", ContextWorkspace.redo, "Repeats the last deletion that was undone."),
        _define(
            "finish",
            ContextWorkspace.finish,
            "Gives the final answer and ends the conversation.",
            {"answer": _text("The final answer.")},
            ["answer"],
        ),
    )
}


def build_context_tools(workspace: ContextWorkspace, names: Iterable[str]) -> tuple[ContextTool, ...]:
    """The tools with these names for one trajectory."""
    return tuple(ContextTool(*_DEFINITIONS[name], workspace) for name in names)
