"""What an agent that edits its context has besides its messages: edits, notes, the index of its document.

It is a part of the LoopState, so it is stored and resumed with it. The messages of the LoopState are the full
history and only grow; the id of a message is its position in them. Which of them the model is shown, and
which as stubs, follows from the edits alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from branchline.core.context_edits import (
    INVOKING_ID,
    MESSAGE_ID,
    ContextEdit,
    ContextView,
    build_view,
    read_result_fields,
)
from branchline.core.errors import InputError
from branchline.core.message import Message
from branchline.loop.tools.base import ToolResult

UpdateMode = Literal["append", "overwrite", "delete"]


class Note(msgspec.Struct):
    """A note that the model has written."""

    summary: str
    content: str


class IndexConfig(msgspec.Struct, frozen=True):
    """The index that the model has built; its chunks follow from these values and the document."""

    index_id: str
    file_name: str
    chunk_size: int
    overlap: int


class ContextState(msgspec.Struct):
    """The edits, notes and index of one trajectory."""

    deletions: list[ContextEdit] = []
    """Deletions by the model, in order; undone ones are in `undone`."""
    undone: list[ContextEdit] = []
    compactions: list[ContextEdit] = []
    """Edits by a compaction policy; the model cannot undo them."""
    is_recount_needed: bool = False
    """Whether the next prompt has to be counted again, because a compaction changed it."""
    notes: dict[str, Note] = {}
    index: IndexConfig | None = None
    index_count: int = 0
    """How many indexes were built."""
    scanned_chunks: list[int] = []
    """Chunks of the index that were read with `enable_scan`, in order."""
    final_answer: str | None = None
    """The argument of `finish`."""

    @property
    def edits(self) -> list[ContextEdit]:
        return [*self.deletions, *self.compactions]

    def view(self, history: Sequence[Message]) -> ContextView:
        return build_view(history, self.edits)

    def delete(self, history: Sequence[Message], message_ids: Sequence[int]) -> tuple[int, ...]:
        """Deletes messages of the history; returns their ids in order.

        Raises InputError, and deletes nothing, if one of them cannot be deleted. The last message is that of
        the current turn.
        """
        wanted = tuple(sorted(set(message_ids)))
        if not wanted:
            raise InputError("message_ids: got none, expected the ids of messages to delete")
        deleted = {index for edit in self.edits for index in edit.message_ids}
        for message_id in wanted:
            if not 0 <= message_id < len(history):
                raise InputError(f"message_ids: got {message_id}, expected ids from 0 to {len(history) - 1}")
            role = history[message_id].role
            if role not in ("assistant", "tool"):
                raise InputError(
                    f"message_ids: {message_id} is a {role} message, expected one of an assistant or a tool"
                )
            if message_id in deleted:
                raise InputError(
                    f"message_ids: {message_id} has been deleted already, expected another message"
                )
            if message_id == len(history) - 1:
                raise InputError(
                    f"message_ids: {message_id} is the current message, expected an earlier message"
                )
        self.deletions.append(ContextEdit(wanted))
        self.undone.clear()
        return wanted

    def undo(self) -> tuple[int, ...]:
        """Restores the messages of the last deletion; returns their ids."""
        if not self.deletions:
            raise InputError("nothing to undo: no deletion is in effect")
        self.undone.append(self.deletions.pop())
        return self.undone[-1].message_ids

    def redo(self) -> tuple[int, ...]:
        """Deletes the messages of the last deletion that was undone again; returns their ids."""
        if not self.undone:
            raise InputError("nothing to redo: no deletion was undone since the last one")
        self.deletions.append(self.undone.pop())
        return self.deletions[-1].message_ids

    def add_note(self, key: str, summary: str, content: str) -> None:
        if not key:
            raise InputError("key: got an empty text, expected a name for the note")
        if key in self.notes:
            raise InputError(f"key: {key!r} exists already, expected a new key, or use updateNote")
        self.notes[key] = Note(summary, content)

    def find_note(self, key: str) -> Note:
        try:
            return self.notes[key]
        except KeyError:
            raise InputError(f"key: got {key!r}, expected one of {list(self.notes)}") from None

    def update_note(
        self, key: str, mode: UpdateMode, content: str | None = None, summary: str | None = None
    ) -> None:
        note = self.find_note(key)
        if mode == "delete":
            del self.notes[key]
            return
        if content is None and summary is None:
            raise InputError(f"content: got none, expected a content or a summary to {mode}")
        if content is not None:
            note.content = f"{note.content}\n{content}" if mode == "append" else content
        if summary is not None:
            note.summary = summary


def label_result(result: ToolResult, message_id: int, invoking_id: int) -> Message:
    """The message of a tool result with its id and that of the message that called the tool.

    A result that is a JSON object gets the ids as fields; any other text becomes the field `message`.

    >>> label_result(ToolResult("42"), 3, 2).content
    '{"msg_id":3,"msg_id(invoking_assistant)":2,"message":"42"}'
    """
    fields: dict[str, Any] = {MESSAGE_ID: message_id, INVOKING_ID: invoking_id}
    if result.is_error:
        fields["status"] = "error"
    own = read_result_fields(result.content)
    fields |= {name: value for name, value in own.items() if name not in fields} or {
        "message": result.content
    }
    content = msgspec.json.encode(fields).decode()
    return msgspec.structs.replace(result, content=content).message
