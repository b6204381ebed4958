"""What an agent that edits its context has besides its messages: edits, notes, the index of its document.

It is a part of the LoopState, so it is stored and resumed with it. The messages of the LoopState are the full
history and only grow; the id of a message is its position in them. Which of them the model is shown, and
which as stubs, follows from the edits alone.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from branchline.core.context_edits import (
    INVOKING_ID,
    MESSAGE_ID,
    ContextEdit,
    ContextView,
    build_view,
    read_result_fields,
    stub_message,
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


class EditEffect(NamedTuple):
    """What an undo or a redo did."""

    changed: tuple[int, ...]
    """The messages that the model is shown otherwise now."""
    compacted: tuple[int, ...]
    """Messages of the same deletion that a compaction replaced since; they are shown as before."""


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

    @property
    def compacted_ids(self) -> set[int]:
        """The messages that compactions replaced; an undo does not bring them back."""
        return {message_id for edit in self.compactions for message_id in edit.message_ids}

    def delete(self, history: Sequence[Message], message_ids: Sequence[int]) -> tuple[int, ...]:
        """Deletes messages of the history; returns their ids in order.

        Raises InputError, and deletes nothing, if one of them cannot be deleted. The last message is that of
        the current turn.
        """
        wanted = tuple(sorted(set(message_ids)))
        if not wanted:
            raise InputError("message_ids: got none, expected the ids of messages to delete")
        deleted = {message_id for edit in self.deletions for message_id in edit.message_ids}
        compacted = self.compacted_ids
        for message_id in wanted:
            if not 0 <= message_id < len(history):
                raise InputError(f"message_ids: got {message_id}, expected ids from 0 to {len(history) - 1}")
            message = history[message_id]
            if message.role not in ("assistant", "tool"):
                raise InputError(
                    f"message_ids: {message_id} is a {message.role} message, "
                    "expected one of an assistant or a tool"
                )
            if message_id in deleted or stub_message(message) == message:
                raise InputError(
                    f"message_ids: {message_id} has been deleted already, expected another message"
                )
            if message_id in compacted:
                raise InputError(
                    f"message_ids: {message_id} was replaced when the context was compacted, "
                    "expected another message"
                )
            if message_id == len(history) - 1:
                raise InputError(
                    f"message_ids: {message_id} is the current message, expected an earlier message"
                )
        self.deletions.append(ContextEdit(wanted))
        self.undone.clear()
        return wanted

    def undo(self) -> EditEffect:
        """Restores the messages of the last deletion that can be undone.

        A message that was compacted since stays replaced. Raises InputError, and changes nothing, if that
        holds for all deleted messages.
        """
        return _move_last_effective(self.deletions, self.undone, self.compacted_ids, "undo", "deleted")

    def redo(self) -> EditEffect:
        """Deletes the messages of the last deletion that was undone again; otherwise the same as `undo`."""
        return _move_last_effective(self.undone, self.deletions, self.compacted_ids, "redo", "restored")

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
            if content is not None or summary is not None:
                raise InputError("mode: got delete with a content or a summary, expected neither with it")
            del self.notes[key]
            return
        if content is None and summary is None:
            raise InputError(f"content: got none, expected a content or a summary to {mode}")
        if mode == "append":
            content = f"{note.content}\n{content}" if content else None
        changed = Note(
            note.summary if summary is None else summary, note.content if content is None else content
        )
        if changed == note:
            raise InputError(f"key: {key!r} has this content and summary already, nothing was changed")
        self.notes[key] = changed

    def finish(self, answer: str) -> None:
        if self.final_answer is not None:
            raise InputError(f"answer: the final answer is {self.final_answer!r} already, expected one only")
        self.final_answer = answer


def _move_last_effective(
    source: list[ContextEdit],
    target: list[ContextEdit],
    compacted: Collection[int],
    verb: str,
    done: str,
) -> EditEffect:
    """Moves the last edit whose messages are not all compacted from one list to the other."""
    for index in reversed(range(len(source))):
        edit = source[index]
        changed = tuple([one for one in edit.message_ids if one not in compacted])
        if changed:
            target.append(source.pop(index))
            return EditEffect(changed, tuple([one for one in edit.message_ids if one in compacted]))
    if source:
        ids = sorted({message_id for edit in source for message_id in edit.message_ids})
        raise InputError(
            f"nothing to {verb}: the messages {ids} were {done} and then replaced when the context was "
            "compacted, which cannot be undone"
        )
    none = "no deletion is in effect" if verb == "undo" else "no deletion was undone since the last one"
    raise InputError(f"nothing to {verb}: {none}")


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
