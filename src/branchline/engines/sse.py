"""Server-sent events out of bytes: wherever the bytes were cut on their way, the events are the same.

Only `data` matters to us. An event is whole with the empty line behind it; what was begun and not ended is
no event, unless the answer itself has ended there.
"""

from __future__ import annotations

_DONE = b"[DONE]"
"""How servers of OpenAI's kind end a stream; says nothing that the end of the answer does not."""


class SseParser:
    """Finds the data of events in the bytes of one answer.

    >>> reader = SseParser()
    >>> reader.feed(b'data: {"a": 1}\\n\\n: still here\\n\\ndata: {"a"')
    [b'{"a": 1}']
    >>> reader.feed(b": 2}\\r\\n\\r\\ndata: [DONE]\\n\\n")
    [b'{"a": 2}']
    """

    def __init__(self) -> None:
        self._partial_line = b""
        """The line that has begun."""
        self._event_lines: list[bytes] = []
        """The data of the event that has begun."""

    def feed(self, piece: bytes) -> list[bytes]:
        """The data of every event that this piece ends."""
        if (
            piece.endswith(b"}\n\n")
            and piece.startswith(b"data: {")
            and not (self._partial_line or self._event_lines)
        ):
            # Mostly: one event, or several alike, whole.
            event = piece[6:-2]
            if b"\n" not in event:
                return [event]
            events = event.split(b"\n\ndata: ")
            if not any(b"\n" in event or b"\r" in event or event == _DONE for event in events):
                return events
        text = self._partial_line + piece
        if b"\r" in text:
            text = text.replace(b"\r\n", b"\n")
        *lines, self._partial_line = text.split(b"\n")
        data, events = self._event_lines, []
        for line in lines:
            if line.startswith(b"data:"):
                data.append(line[6:] if line.startswith(b" ", 5) else line[5:])
            elif data and not line:
                event = b"\n".join(data)
                data.clear()
                if event != _DONE:
                    events.append(event)
        return events

    def flush(self) -> list[bytes]:
        """The last event of an answer that forgot the empty line behind it."""
        return self.feed(b"\n\n")
