"""Keys and values of the running sequences, one row each, and the model's forward pass over them.

Every sequence starts at position 0 of its row, whatever the lengths of the other rows. A step writes new keys
and values in place and masks the positions after the end of each row, so a sequence joins or leaves without
touching the others, and nothing is copied from step to step.

Invariant: memory stays within the limit, or is one row. Values after the end of a row are finite: masked
positions have weight 0, but 0 times NaN would be NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import add
from typing import Any, Final, cast

import numpy as np
import torch
from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from branchline.core.errors import EngineInputError
from branchline.core.token_arrays import Ids
from branchline.engines.hf import attention
from branchline.engines.hf.decode_graphs import DecodeGraphs
from branchline.engines.hf.prefix_cache import KeysValues

# Rows grow by this many tokens at a time; each time all rows are copied.
GROWTH_TOKENS: Final = 256
_SUPPORTED_LAYER_TYPES: Final = {"full_attention", "sliding_attention", "global"}
"""Layers that cache keys and values and attend to all of them or to a window."""
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class StepPlan:
    """Where a step writes its keys and values, and which rows it reads."""

    rows: slice | Tensor
    width: int
    """Queries of each row."""
    length: int
    """Keys of each row."""
    write_rows: Tensor
    write_positions: Tensor
    is_real_b_q: Tensor | None
    """Which queries are not padding; None if none is."""


@dataclass(frozen=True)
class MultimodalInputs:
    """What a step of a vision-language model needs besides ids."""

    positions: Sequence[Array]
    """The positions of the ids of each row: [3, tokens]."""
    features: Sequence[tuple[int, int, Tensor]]
    """Row, place among its ids, and the features that replace the embeddings from there on."""


@dataclass(frozen=True)
class KvShape:
    """The shape of a layer's keys or values."""

    heads: int
    dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def token_bytes(self) -> int:
        return self.heads * self.dim * int(self.dtype.itemsize)

    def zeros(self, rows: int, length: int) -> Tensor:
        return torch.zeros((rows, self.heads, length, self.dim), dtype=self.dtype, device=self.device)


class KvCacheLayer:
    """One layer's rows, as a transformers cache layer."""

    is_sliding = False
    is_compileable = False

    def __init__(self, keys: KvShape, values: KvShape) -> None:
        self.shapes = (keys, values)
        self.keys = keys.zeros(0, 0)
        self.values = values.zeros(0, 0)
        self.plan: StepPlan | None = None

    def resize(self, rows: int, length: int) -> None:
        self.keys = _copy_into(self.keys, self.shapes[0].zeros(rows, length))
        self.values = _copy_into(self.values, self.shapes[1].zeros(rows, length))

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Called by the model's attention: writes the step's keys and values, returns all of the rows'."""
        plan = self.plan
        assert plan is not None
        for store, states in ((self.keys, key_states), (self.values, value_states)):
            new_b_q = states.transpose(1, 2)
            new_n = new_b_q.flatten(0, 1) if plan.is_real_b_q is None else new_b_q[plan.is_real_b_q]
            store[plan.write_rows, :, plan.write_positions] = new_n
        return self.keys[plan.rows, :, : plan.length], self.values[plan.rows, :, : plan.length]

    def get_seq_length(self) -> int:
        """Called, like `get_mask_sizes`, when the model builds its own mask."""
        return self.plan.length - self.plan.width if self.plan else 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0


# Registered instead of inherited: the base class's state and methods are not used.
CacheLayerMixin.register(KvCacheLayer)


class BatchKvCache:
    """A model and the rows that it decodes."""

    def __init__(self, model: Any, limit_bytes: int, max_rows: int) -> None:
        self._model = model
        self._max_rows = max_rows
        self._layers, self._windows = _build_layers(model)
        self.device = self._layers[0].shapes[0].device
        self.token_bytes = sum(shape.token_bytes for layer in self._layers for shape in layer.shapes)
        self._limit = limit_bytes // self.token_bytes
        self._cache = Cache(layers=cast(Any, self._layers))
        self._visible_bias = torch.zeros((), dtype=self._layers[0].shapes[0].dtype, device=self.device)
        self._masked_bias = torch.full_like(self._visible_bias, torch.finfo(self._visible_bias.dtype).min)
        self.capacity = (0, 0)
        self._decode_graphs = DecodeGraphs() if self.device.type == "cuda" else None
        # Ids, positions and write positions of a decode step, and the numbers of its rows.
        self._decode_inputs = self._tensor(np.zeros((3, max_rows), np.int64))
        self._row_numbers = self._tensor(np.arange(max_rows))

    def reserve(self, rows: int, length: int) -> bool:
        """Grows to this many rows of this many tokens; returns False if the limit does not allow it."""
        if rows <= self.capacity[0] and length <= self.capacity[1]:
            return True
        length = -(-length // GROWTH_TOKENS) * GROWTH_TOKENS
        rounded_up = min(1 << (rows - 1).bit_length(), self._max_rows)
        for count in (max(rounded_up, rows), rows):
            if count * length <= self._limit or count == 1:
                self._resize(count, length)
                return True
        return False

    def free(self) -> None:
        self._resize(0, 0)

    def write_row(self, row: int, kv: KeysValues, length: int) -> None:
        """Writes the first `length` tokens of a row."""
        for layer, (keys, values) in zip(self._layers, kv, strict=True):
            layer.keys[row, :, :length] = keys[:, :length]
            layer.values[row, :, :length] = values[:, :length]

    def row_view(self, row: int, length: int) -> KeysValues:
        """The first `length` tokens of a row, not copied."""
        return [(layer.keys[row, :, :length], layer.values[row, :, :length]) for layer in self._layers]

    def copy_row(self, row: int, length: int) -> KeysValues:
        """A copy of the first `length` tokens of a row."""
        return [(keys.clone(), values.clone()) for keys, values in self.row_view(row, length)]

    def zero_row(self, row: int) -> None:
        """Removes NaN and infinity from a row."""
        for layer in self._layers:
            layer.keys[row] = 0
            layer.values[row] = 0

    def forward(
        self,
        rows: Sequence[int],
        starts: Sequence[int],
        ids: Sequence[Ids],
        multimodal: MultimodalInputs | None = None,
    ) -> Tensor:
        """Computes `ids[i]` from position `starts[i]` of row `rows[i]` on; returns the logits after the last
        id of each row: [rows, vocab]. Shorter rows are left-padded, so that their last query is real."""
        counts = [len(part) for part in ids]
        if self._decode_graphs is not None and multimodal is None and max(counts) == 1:
            return self._decode(self._decode_graphs, rows, starts, [int(part[0]) for part in ids])
        tokens_b_q, positions_b_q, is_real_b_q = _pad_batch(starts, ids, counts)
        write_positions = positions_b_q.ravel() if is_real_b_q is None else positions_b_q[is_real_b_q]
        is_consecutive = list(rows) == list(range(rows[0], rows[0] + len(rows)))
        plan = StepPlan(
            rows=slice(rows[0], rows[0] + len(rows)) if is_consecutive else self._tensor(np.array(rows)),
            width=tokens_b_q.shape[1],
            length=max(map(add, starts, counts)),
            write_rows=self._tensor(np.repeat(rows, counts)),
            write_positions=self._tensor(write_positions),
            is_real_b_q=None if is_real_b_q is None else self._tensor(is_real_b_q),
        )
        positions = self._tensor(positions_b_q)
        # For rows of equal length the model's own mask is right, and often is none, which is faster.
        is_uniform = is_real_b_q is None and len(set(starts)) == 1
        inputs: dict[str, Any] = {"input_ids": self._tensor(tokens_b_q), "position_ids": positions}
        if multimodal is not None:
            inputs = self._multimodal_arguments(inputs["input_ids"], positions_b_q, multimodal)
        return self._run_model(plan, inputs, None if is_uniform else self._mask(positions, plan.length))

    def _decode(
        self, graphs: DecodeGraphs, rows: Sequence[int], starts: Sequence[int], ids: Sequence[int]
    ) -> Tensor:
        """`forward` with one id for each row, in one of few shapes: rows are rounded up to a power of two,
        keys to `GROWTH_TOKENS`. A row that is not among `rows` writes to its last position, which no row
        reaches before all rows are moved."""
        count = min(1 << max(rows).bit_length(), self.capacity[0])
        length = -(-(max(starts) + 1) // GROWTH_TOKENS) * GROWTH_TOKENS
        inputs = np.zeros((3, count), np.int64)
        inputs[2] = self.capacity[1] - 1
        inputs[:, rows] = ids, starts, starts
        self._decode_inputs[:, :count].copy_(torch.from_numpy(inputs))

        def compute() -> Tensor:
            tokens_b_q, positions_b_q = self._decode_inputs[:2, :count, None]
            plan = StepPlan(
                rows=slice(0, count),
                width=1,
                length=length,
                write_rows=self._row_numbers[:count],
                write_positions=self._decode_inputs[2, :count],
                is_real_b_q=None,
            )
            step = {"input_ids": tokens_b_q, "position_ids": positions_b_q}
            return self._run_model(plan, step, self._mask(positions_b_q, length))

        logits = graphs.run((count, length), compute)
        return logits[: len(rows)] if rows[-1] == len(rows) - 1 else logits[self._tensor(np.array(rows))]

    def _run_model(
        self, plan: StepPlan, inputs: dict[str, Any], mask: Tensor | dict[str, Tensor] | None
    ) -> Tensor:
        for layer in self._layers:
            layer.plan = plan
        output = self._model(
            **inputs, attention_mask=mask, past_key_values=self._cache, use_cache=True, logits_to_keep=1
        )
        logits: Tensor = output.logits[:, -1]
        return logits

    def _multimodal_arguments(
        self, tokens_b_q: Tensor, positions_b_q: Array, multimodal: MultimodalInputs
    ) -> dict[str, Any]:
        """Embeddings with the features of images in place, and positions with three axes."""
        width = tokens_b_q.shape[1]
        embeddings = self._model.get_input_embeddings()(tokens_b_q)
        positions_3_b_q = np.broadcast_to(positions_b_q, (3, *positions_b_q.shape)).copy()
        padding = [width - part.shape[1] for part in multimodal.positions]
        for row, part in enumerate(multimodal.positions):
            positions_3_b_q[:, row, padding[row] :] = part
        for row, start, features in multimodal.features:
            first = padding[row] + start
            embeddings[row, first : first + len(features)] = features.to(embeddings.dtype)
        return {"inputs_embeds": embeddings, "position_ids": self._tensor(positions_3_b_q)}

    def _mask(self, positions_b_q: Tensor, length: int) -> Tensor | dict[str, Tensor]:
        """The attention mask that the model expects: one, or one for each type of layer."""
        query_b_1_q_1 = positions_b_q[:, None, :, None]
        keys_k = torch.arange(length, device=positions_b_q.device)
        # An additive mask: every layer would convert a boolean one again.
        masks = {}
        for kind, window in self._windows.items():
            is_seen = keys_k <= query_b_1_q_1
            if window is not None:
                is_seen &= keys_k > query_b_1_q_1 - window
            masks[kind] = torch.where(is_seen, self._visible_bias, self._masked_bias)
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _resize(self, rows: int, length: int) -> None:
        if self._decode_graphs is not None:
            self._decode_graphs.clear()
        for layer in self._layers:
            layer.resize(rows, length)
        self.capacity = (rows, length)

    def _tensor(self, values: Array) -> Tensor:
        return torch.from_numpy(values).to(self.device)


def _pad_batch(
    starts: Sequence[int], ids: Sequence[Ids], counts: Sequence[int]
) -> tuple[Array, Array, Array | None]:
    """Tokens, positions and which of them are real, each [rows, queries]; None if nothing is padding."""
    width = max(counts)
    if min(counts) == width:
        return np.stack(ids).astype(np.int64), np.add.outer(starts, np.arange(width)), None
    offsets_b_q = np.arange(width) - (width - np.array(counts))[:, None]
    is_real_b_q = offsets_b_q >= 0
    tokens_b_q = np.zeros(offsets_b_q.shape, np.int64)
    tokens_b_q[is_real_b_q] = np.concatenate(ids)
    return tokens_b_q, np.array(starts)[:, None] + np.maximum(offsets_b_q, 0), is_real_b_q


def _copy_into(old: Tensor, new: Tensor) -> Tensor:
    rows, length = min(old.shape[0], new.shape[0]), min(old.shape[2], new.shape[2])
    new[:rows, :, :length] = old[:rows, :, :length]
    return new


def _build_layers(model: Any) -> tuple[list[KvCacheLayer], dict[str, int | None]]:
    """A cache layer for each of the model's, and the window of each type, found with one forward pass."""
    attention.install(model)
    kind = model.config._attn_implementation
    if kind not in (attention.ATTENTION_NAME, "sdpa", "eager"):
        raise EngineInputError(
            f"attn_implementation: got {kind!r}, expected 'sdpa' or 'eager', which take a mask"
        )
    config = model.config.get_text_config()
    named = getattr(config, "layer_types", None) or getattr(config, "attention_layers", None) or ()
    if other := sorted(set(named) - _SUPPORTED_LAYER_TYPES):
        raise _unsupported_model_error(f"layers of {other[0]!r}")
    cache: Any = DynamicCache(config=model.config)
    try:
        with torch.inference_mode():
            model(input_ids=torch.zeros((1, 1), dtype=torch.long, device=model.device), past_key_values=cache)
    except Exception as error:
        raise _unsupported_model_error(f"{type(model).__name__} ({type(error).__name__}: {error})") from error
    layers: list[KvCacheLayer] = []
    windows: dict[str, int | None] = {}
    for layer in cache.layers:
        if type(layer) is DynamicLayer:
            windows["full_attention"] = None
        elif type(layer) is DynamicSlidingWindowLayer:
            if windows.setdefault("sliding_attention", layer.sliding_window) != layer.sliding_window:
                raise _unsupported_model_error("windows of several sizes")
        else:
            raise _unsupported_model_error(f"a cache of {type(layer).__name__}")
        if layer.keys is None:
            raise _unsupported_model_error(f"{type(model).__name__}, which leaves a layer of its cache empty")
        layers.append(KvCacheLayer(*(_kv_shape(states) for states in (layer.keys, layer.values))))
    return layers, windows


def _unsupported_model_error(got: str) -> EngineInputError:
    return EngineInputError(
        f"model: got {got}, expected layers of full or sliding attention that cache keys and values"
    )


def _kv_shape(states: Tensor) -> KvShape:
    return KvShape(states.shape[1], states.shape[3], states.dtype, states.device)
