"""What a model can be shown of its tools' results: pictures and files only where its codec takes them.

Whether it does is asked before a result becomes part of the conversation. One that could not be shown would
stand there for good, and no later prompt could be built.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence

from msgspec import structs

from branchline.core.errors import CodecError, InputError
from branchline.core.message import Message
from branchline.loop.state import ToolRecord
from branchline.loop.tools.tool_session import tool_error_text

_MESSAGE_INDEX = re.compile(r"^messages\[\d+\]")


async def filter_media(
    records: Sequence[ToolRecord], count: Callable[[Sequence[Message]], Awaitable[int]]
) -> list[ToolRecord]:
    """Results as the model can be shown them; one that it cannot see becomes an error that says why.

    `count` gives the size of the next prompt with messages behind it, or refuses them.
    """
    shown = [_without_media(record) if record.message.media else record for record in records]
    for place, record in enumerate(records):
        if not record.message.media:
            continue
        words, shown[place] = shown[place], record
        try:
            await count([one.message for one in shown])
        # A gateway elsewhere tells what its codec refuses as bad input.
        except (CodecError, InputError) as error:
            shown[place] = _as_media_error(words, error)
    return shown


def _without_media(record: ToolRecord) -> ToolRecord:
    return structs.replace(record, message=structs.replace(record.message, parts=()))


def _as_media_error(record: ToolRecord, error: Exception) -> ToolRecord:
    # Where it would have stood says nothing to a model.
    error = InputError(_MESSAGE_INDEX.sub("its result", str(error)))
    text = tool_error_text(record.tool, error)
    return structs.replace(record, message=structs.replace(record.message, content=text), error=text)
