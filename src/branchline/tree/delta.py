"""What a commit adds to a tree, as a value: applied at commit, written to the journal, applied again on
replay.

Both paths use `Tree.apply`, so a replayed tree equals the original.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from branchline.core.call import Call, Delivery, Output
from branchline.core.message import Message
from branchline.core.token_arrays import Ids, Runs
from branchline.tree.node import NO_NODE


class NewNode(msgspec.Struct, frozen=True, array_like=True):
    """A node to add; parents precede their children."""

    id: int
    parent_id: int
    message: Message
    ids: Ids
    spans: Runs
    source_id: int = NO_NODE
    output: Output | None = None


class TreeDelta(msgspec.Struct, frozen=True, array_like=True, tag="commit"):
    """One commit: the missing context nodes, the sampled nodes and the call."""

    nodes: tuple[NewNode, ...]
    call: Call


class Delivered(msgspec.Struct, frozen=True, array_like=True, tag="delivery"):
    """The delivery of a call's outputs."""

    call_index: int
    delivery: Delivery


TreeRecord = TreeDelta | Delivered


def _encode_array(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return (value.dtype.str, list(value.shape), value.tobytes())
    if isinstance(value, np.generic):
        return value.item()
    raise NotImplementedError(f"{type(value).__name__} in a journal record")


def decode_array(_: type, value: Any) -> Any:
    """The `dec_hook` with which a decoder reads arrays of records."""
    dtype, shape, data = value
    array = np.frombuffer(data, dtype).reshape(shape)
    array.flags.writeable = False
    return array


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_array)
_decoder: msgspec.msgpack.Decoder[TreeRecord] = msgspec.msgpack.Decoder(TreeRecord, dec_hook=decode_array)


def encode_record(record: msgspec.Struct) -> bytes:
    """Encodes a record of this module, or another struct kept in the same journal."""
    return _encoder.encode(record)


def decode_record(data: bytes) -> TreeRecord:
    return _decoder.decode(data)
