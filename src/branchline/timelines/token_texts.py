"""The tokens of an answer whose ids were not logged, as its logprobs name them.

Logprobs of such an answer belong to the ids that its text is encoded to only if the tokens are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Any

import numpy as np

from branchline.core.errors import MessageError
from branchline.core.token_arrays import Floats, Ids

TokenTexts = tuple[bytes | None, ...]


def read_token_texts(logprobs: Any, field_path: str) -> TokenTexts:
    """Returns the bytes of each token, as the server wrote them."""
    texts: list[bytes | None] = []
    for index, entry in enumerate(logprobs["content"] if isinstance(logprobs, dict) else logprobs):
        content, text = entry.get("bytes"), entry.get("token")
        if not content:
            texts.append(text.encode("utf-8", "surrogatepass") if isinstance(text, str) else None)
            continue
        try:
            texts.append(bytes(content))
        except (TypeError, ValueError):
            raise MessageError(f"{field_path}.content[{index}].bytes", content, "a list of bytes") from None
    return tuple(texts)


def fit_logprobs(
    texts: TokenTexts,
    logprobs: Floats,
    ids: Ids,
    token_bytes: Callable[[int], bytes],
    stop_ids: Set[int],
) -> Floats | str:
    """Returns the logprobs of encoded ids, NaN for a stop token that the server left out; a text that says
    how the tokens differ if they do."""
    count = len(ids)
    while count > len(texts) and int(ids[count - 1]) in stop_ids:
        count -= 1
    if count != len(texts):
        return f"{len(texts)} tokens, expected {count}"
    for index, text in enumerate(texts):
        expected = token_bytes(int(ids[index]))
        if text != expected and not (text == b"" and int(ids[index]) in stop_ids):
            return f"token {index} {text!r}, expected {expected!r}"
    fitted = np.full(len(ids), np.nan, np.float32)
    fitted[:count] = logprobs
    return fitted
