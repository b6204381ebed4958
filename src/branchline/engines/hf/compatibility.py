"""What a model can compute: the longest sequence, and rows of different lengths together and in portions.

Not every causal model can compute such rows: some have no keys and values, some count positions themselves,
some build a bias from a mask of another shape. Some of these fail, others compute wrong results. So the
logits of two rows computed together are compared with those of each row alone.
"""

from __future__ import annotations

import logging
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from branchline.core.errors import EngineInputError
from branchline.core.token_arrays import as_ids
from branchline.engines.hf.kv_cache import BatchKvCache

log = logging.getLogger("branchline.engines")

_PROMPT_LENGTHS: Final = (7, 3)
"""Lengths of the two rows."""
_PREFILL_LENGTHS: Final = (4, 2)
"""The part of each row that is computed alone, before the rest is computed together."""
# Fractions of the difference between the two rows. A wrong position or an additional key changes the logits
# by a large fraction of it; rounding, even in half precision and with experts, by much less.
_TOLERANCES: Final = {torch.float32: 0.002, torch.float64: 0.002}
_HALF_PRECISION_TOLERANCE: Final = 0.1
_ABSOLUTE_TOLERANCE: Final = 1e-3


def find_max_context(config: Any) -> int | None:
    """Returns the longest sequence that a model can be given.

    `longrope` rotates all keys differently once a sequence exceeds the original length. Cached keys would be
    wrong from there on, so such a model is limited to that length.
    """
    length: int | None = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if rope.get("rope_type", rope.get("type")) != "longrope":
        return length
    original = rope.get("original_max_position_embeddings") or getattr(
        config, "original_max_position_embeddings", None
    )
    if original is not None and (length is None or original < length):
        log.warning(
            "model: longrope changes all keys of a sequence beyond %d tokens; the context is limited to that",
            original,
        )
        return int(original)
    return length


def check_compatibility(model: Any) -> None:
    """Raises EngineInputError for a model that cannot decode rows of different lengths."""
    rows = BatchKvCache(model, limit_bytes=2**62, max_rows=2)
    vocab = model.get_input_embeddings().weight.shape[0]
    prompts = [as_ids(np.arange(size) * 7919 % vocab) for size in _PROMPT_LENGTHS]
    try:
        with torch.inference_mode():
            alone = torch.cat([_unbatched_logits(model, ids) for ids in prompts])
            rows.reserve(len(prompts), max(_PROMPT_LENGTHS))
            for row, (ids, first) in enumerate(zip(prompts, _PREFILL_LENGTHS, strict=True)):
                rows.forward([row], [0], [ids[:first]])
            rest = [ids[first:] for ids, first in zip(prompts, _PREFILL_LENGTHS, strict=True)]
            together = rows.forward([0, 1], _PREFILL_LENGTHS, rest)
            off = (alone.log_softmax(-1) - together.float().log_softmax(-1)).abs().max().item()
            apart = (alone[0].log_softmax(-1) - alone[1].log_softmax(-1)).abs().max().item()
    except Exception as error:
        raise EngineInputError(
            f"model: got {type(model).__name__}, expected one that takes rows of different lengths with a "
            f"mask and positions: {type(error).__name__}: {error}"
        ) from error
    if off > _ABSOLUTE_TOLERANCE + _TOLERANCES.get(model.dtype, _HALF_PRECISION_TOLERANCE) * apart:
        raise EngineInputError(
            f"model: got {type(model).__name__}, whose logprobs are off by {off:.3g} when two rows are "
            "computed together, expected those of each alone"
        )


def _unbatched_logits(model: Any, ids: Any) -> Tensor:
    tokens = torch.from_numpy(ids.astype(np.int64))[None].to(model.device)
    logits: Tensor = model(input_ids=tokens, use_cache=False).logits[:, -1]
    return logits.float()
