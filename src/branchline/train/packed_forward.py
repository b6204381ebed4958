"""Log-probabilities of the trained tokens of a packed batch, with any transformers decoder.

The attention mask is the batch's own rule: token q sees token k if `k <= q < subtree_ends[k]`. For a model
with FlexAttention, which `train/layouts.py` chooses on a GPU, it is a block mask that is never built as a
matrix, else a dense mask. Sliding-window layers
get the same mask limited to the window. Only the hidden states that predict trained tokens go through the
output layer, in chunks that are recomputed in the backward pass: logits of a long batch would not fit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from branchline.core.errors import InputError
from branchline.export.packing import PackedBatch

_LAYER_TYPES = ("full_attention", "sliding_attention")
_BLOCK = 128
"""Block size of FlexAttention; it compiles per shape, so lengths are padded to whole blocks."""
_CHUNK_TOKENS = 1024


@dataclass(frozen=True)
class TokenOutputs:
    """What the model says about the trained tokens of a batch."""

    places: Tensor
    """Their indices in the batch."""
    logprobs: Tensor
    entropies: Tensor | None
    """Entropy of the distribution that each token was drawn from, if it was requested."""


def forward_packed(
    model: nn.Module,
    batch: PackedBatch,
    *,
    temperature: float = 1.0,
    with_entropy: bool = False,
    chunk_tokens: int = _CHUNK_TOKENS,
) -> TokenOutputs:
    """Returns the logprobs of all trained tokens of a batch.

    Raises InputError if the model's attention cannot follow the batch's mask.
    """
    check_model(model)
    device = next(model.parameters()).device
    length = len(batch)
    padding = -length % _BLOCK if _uses_flex(model) else 0
    ids = torch.from_numpy(np.pad(batch.ids, (0, padding))).long().to(device)
    positions = torch.from_numpy(np.pad(batch.positions, (0, padding))).long().to(device)
    ends = np.concatenate([batch.subtree_ends, np.arange(length + 1, length + padding + 1, dtype=np.int32)])
    mask = _attention_masks(model, torch.from_numpy(ends).to(device), positions)
    decoder: Any = model.base_model
    hidden = decoder(
        input_ids=ids[None], position_ids=positions[None], attention_mask=mask, use_cache=False
    ).last_hidden_state[0]
    return _token_outputs(_output_layer(model), hidden, ids, batch, temperature, with_entropy, chunk_tokens)


def forward_row(
    model: nn.Module,
    batch: PackedBatch,
    *,
    temperature: float = 1.0,
    with_entropy: bool = False,
    chunk_tokens: int = _CHUNK_TOKENS,
) -> TokenOutputs:
    """Returns the same for a batch of one row, by a plain forward pass that any causal model can do."""
    if len(batch.paths) != 1:
        raise InputError(f"batch: has {len(batch.paths)} rows, expected one")
    causal: Any = model
    ids = torch.from_numpy(batch.ids).long().to(next(model.parameters()).device)
    if "dynamic" in _rope_types(model.config):
        # Its frequencies stay those of the longest row so far until a short row resets them.
        with torch.no_grad():
            causal(input_ids=ids[None, :1], use_cache=False)
    logits = causal(input_ids=ids[None], use_cache=False).logits[0]
    return _token_outputs(nn.Identity(), logits, ids, batch, temperature, with_entropy, chunk_tokens)


def _token_outputs(
    head: Callable[[Tensor], Tensor],
    hidden: Tensor,
    ids: Tensor,
    batch: PackedBatch,
    temperature: float,
    with_entropy: bool,
    chunk_tokens: int,
) -> TokenOutputs:
    """Returns the outputs of all trained tokens; `head` makes logits of hidden states, in chunks."""
    trained = np.flatnonzero(batch.weights)
    if (batch.parents[trained] < 0).any():
        raise InputError("batch: the first token of a row is trained, expected a prompt before it")
    places = torch.from_numpy(trained).to(ids.device)
    sources, targets = torch.from_numpy(batch.parents[trained]).long().to(ids.device), ids[places]
    logprobs: list[Tensor] = []
    entropies: list[Tensor] = []
    for start in range(0, len(trained), chunk_tokens):
        part = slice(start, start + chunk_tokens)
        values, entropy = checkpoint(
            _chunk_logprobs, head, hidden[sources[part]], targets[part], temperature, with_entropy,
            use_reentrant=False,
        )  # fmt: skip
        logprobs.append(values)
        entropies.append(entropy)
    empty = hidden.new_zeros(0, dtype=torch.float32)
    return TokenOutputs(
        places,
        torch.cat(logprobs) if logprobs else empty,
        (torch.cat(entropies) if entropies else empty) if with_entropy else None,
    )


def check_model(model: nn.Module) -> None:
    """Raises InputError for a model that is known not to follow a tree mask. `train/layouts.py` finds the
    others."""
    config: Any = model.config
    if getattr(config, "vision_config", None) is not None:
        raise InputError(f"model: {config.model_type} takes images, which packed batches cannot hold")
    unknown = sorted(set(_layer_types(config)) - set(_LAYER_TYPES))
    if unknown:
        raise InputError(
            f"model: {config.model_type} has layers of type {', '.join(unknown)}, expected softmax "
            "attention: a state that is carried from token to token cannot branch"
        )
    growing = sorted({"dynamic", "longrope"} & set(_rope_types(config)))
    if growing:
        raise InputError(
            f"model: {config.model_type} has rotary embeddings of type {growing[0]}, whose frequencies "
            "depend on the longest row of a pass"
        )


def _rope_types(config: Any) -> list[str]:
    """Returns the types of the rotary embeddings; a model may have one for each type of layer."""
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, Mapping)]
    return [str(entry.get("rope_type", entry.get("type"))) for entry in nested or [parameters]]


def _layer_types(config: Any) -> list[str]:
    types = getattr(config, "layer_types", None)
    if types:
        return list(types)
    if getattr(config, "model_type", "") in ("mamba", "mamba2", "rwkv", "falcon_mamba"):
        return ["linear_attention"]
    window = getattr(config, "sliding_window", None)
    uses_window = window is not None and getattr(config, "use_sliding_window", True)
    return ["sliding_attention" if uses_window else "full_attention"]


def _uses_flex(model: nn.Module) -> bool:
    config: Any = model.config
    return bool(config._attn_implementation == "flex_attention")


def _attention_masks(model: nn.Module, ends: Tensor, positions: Tensor) -> Any:
    """Returns the mask of each kind of layer, in the form that the model's attention takes."""
    config: Any = model.config
    masks: dict[str, Any] = {}
    for kind in set(_layer_types(config)):
        window = config.sliding_window if kind == "sliding_attention" else None
        if _uses_flex(model):
            masks[kind] = _flex_mask(ends, positions, window)
            continue
        visible = _dense_mask(ends, positions, window)
        if config._attn_implementation == "eager":
            # Eager attention adds its mask to the scores; a boolean one would be wrong without an error.
            dtype = next(model.parameters()).dtype
            blocked = torch.finfo(dtype).min
            visible = torch.zeros_like(visible, dtype=dtype).masked_fill(~visible, blocked)
        masks[kind] = visible
    # Models without a list of layer types take one mask.
    return masks if getattr(config, "layer_types", None) else next(iter(masks.values()))


def _dense_mask(ends: Tensor, positions: Tensor, window: int | None) -> Tensor:
    places = torch.arange(len(ends), device=ends.device)
    visible = (places[None, :] <= places[:, None]) & (places[:, None] < ends[None, :])
    if window is not None:
        visible &= positions[:, None] - positions[None, :] < window
    return visible[None, None]


def _flex_mask(ends: Tensor, positions: Tensor, window: int | None) -> Any:
    """Returns the block mask of FlexAttention, computed from `ends`: no matrix of tokens is built."""
    from torch.nn.attention.flex_attention import BlockMask

    def is_visible(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = (key <= query) & (query < ends[key])
        return seen if window is None else seen & (positions[query] - positions[key] < window)

    some, full = block_pattern(ends)
    if window is not None:
        some, full = some | full, torch.zeros_like(full)
    lists = [_block_lists(blocks) for blocks in (some, full)]
    (counts, indices), (full_counts, full_indices) = lists
    return BlockMask.from_kv_blocks(
        counts, indices, full_counts, full_indices, BLOCK_SIZE=_BLOCK, mask_mod=is_visible
    )


def block_pattern(ends: Tensor) -> tuple[Tensor, Tensor]:
    """Returns for each block of queries and block of keys whether some and whether all pairs are visible.

    A block with all pairs visible is not among those with some.
    """
    blocks = ends.view(-1, _BLOCK)
    starts = torch.arange(len(blocks), device=ends.device) * _BLOCK
    before = starts[None, :] < starts[:, None]
    same = starts[None, :] == starts[:, None]
    full = before & (starts[:, None] + _BLOCK <= blocks.amin(1)[None, :])
    some = same | (before & (starts[:, None] < blocks.amax(1)[None, :]))
    return some & ~full, full


def _block_lists(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the number of blocks in each row, and their indices first in each row."""
    order = torch.argsort(blocks.int(), dim=-1, descending=True, stable=True).int()
    return blocks.sum(-1, dtype=torch.int32)[None, None], order[None, None]


def _output_layer(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """Returns the function from hidden states to logits, as the model itself computes them."""
    decoder: Any = model
    config, head = decoder.config, decoder.get_output_embeddings()
    cap = getattr(config, "final_logit_softcapping", None)
    scale = getattr(config, "logit_scale", None) or 1 / (getattr(config, "logits_scaling", None) or 1)

    def to_logits(hidden: Tensor) -> Tensor:
        logits: Tensor = head(hidden)
        if scale != 1:
            logits = logits * scale
        return torch.tanh(logits / cap) * cap if cap is not None else logits

    return to_logits


def _chunk_logprobs(
    head: Callable[[Tensor], Tensor],
    hidden: Tensor,
    targets: Tensor,
    temperature: float,
    with_entropy: bool,
) -> tuple[Tensor, Tensor]:
    logits = head(hidden)
    logits = (logits if logits.dtype == torch.float64 else logits.float()) / temperature
    normalizer = torch.logsumexp(logits, -1)
    logprobs = logits.gather(-1, targets[:, None])[:, 0] - normalizer
    if not with_entropy:
        return logprobs, logprobs.detach()
    probabilities = torch.softmax(logits, -1)
    return logprobs, normalizer - (probabilities * logits).sum(-1)
