"""The bytes of images and other media, stored once: apart from the messages, by digest.

A record for the journal has no payloads; the journal keeps each payload once, for all sessions. Replay puts
them back, so a replayed tree equals the original. In a tree, all messages with an image share its bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import xxhash
from msgspec import structs

from branchline.core.errors import JournalError
from branchline.core.message import Media
from branchline.tree.tree import TreeDelta

Record = TypeVar("Record")


def share_payloads(record: Record, payloads: dict[str, bytes]) -> Record:
    """Returns a record whose media have the bytes objects in `payloads`; adds those that are new."""

    def share(media: Media) -> Media:
        if not _is_content_addressed(media):
            return media
        payload = payloads.setdefault(media.digest, media.payload)
        return media if payload is media.payload else structs.replace(media, payload=payload)

    return _map_media(record, share)


def detach_payloads(record: Record) -> tuple[Record, dict[str, bytes]]:
    """Returns a record without the payloads of its media, and these by digest.

    A payload stays in the record if its digest is not that of its bytes: it could be mistaken for another.
    """
    payloads: dict[str, bytes] = {}

    def detach(media: Media) -> Media:
        if not _is_content_addressed(media):
            return media
        payloads[media.digest] = media.payload
        return structs.replace(media, payload=b"")

    return _map_media(record, detach), payloads


def restore_payloads(record: Record, read: Callable[[str], bytes | None]) -> Record:
    """Returns a record with the payloads that `detach_payloads` removed; `read` returns one by digest.

    Raises JournalError for a payload that is not what was written.
    """

    def restore(media: Media) -> Media:
        if media.payload:
            return media
        payload = read(media.digest)
        if payload and media.digest != xxhash.xxh3_128_hexdigest(payload):
            raise JournalError(f"media {media.digest}: the payload in the journal is damaged")
        return structs.replace(media, payload=payload) if payload else media

    return _map_media(record, restore)


def _is_content_addressed(media: Media) -> bool:
    return bool(media.payload) and media.digest == xxhash.xxh3_128_hexdigest(media.payload)


def _map_media(record: Record, change: Callable[[Media], Media]) -> Record:
    """Returns a record with every media changed; the record itself if it has none."""
    if not isinstance(record, TreeDelta) or not any(node.message.parts for node in record.nodes):
        return record
    nodes = []
    for node in record.nodes:
        if node.message.parts and node.message.media:
            parts = tuple([change(part) if isinstance(part, Media) else part for part in node.message.parts])
            node = structs.replace(node, message=structs.replace(node.message, parts=parts))
        nodes.append(node)
    return structs.replace(record, nodes=tuple(nodes))
