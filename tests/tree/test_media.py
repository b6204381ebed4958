"""Payloads of media: once in a tree, once in a journal, and back after a restart."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import xxhash

from branchline import Session
from branchline.chat.toy import ToyCodec
from branchline.core.call import Generation, Request
from branchline.core.message import Media, Message
from branchline.core.token_arrays import as_ids
from branchline.tree.journal import Journal
from branchline.tree.media import detach_payloads, restore_payloads


def image(data: bytes, **fields: str) -> Media:
    payload = bytes(bytearray(data))  # another object each time
    return Media("image", xxhash.xxh3_128_hexdigest(payload), payload, **fields)


def user(*parts: str | Media) -> Message:
    return Message("user", "".join(part for part in parts if isinstance(part, str)), parts=parts)


def commit(session: Session, *messages: Message) -> None:
    turn = session.prepare(Request(messages))
    session.commit(turn, Generation(as_ids([65]), message=Message("assistant", "A")))


def test_all_messages_of_a_tree_share_the_bytes_of_an_image() -> None:
    session = Session("s", ToyCodec.chatml())
    commit(session, user("one", image(b"cat" * 50)))
    commit(session, user("two", image(b"cat" * 50, detail="low"), image(b"dog")))
    media = [part for node in session.tree.nodes for part in node.message.media]
    assert [part.payload for part in media] == [b"cat" * 50, b"cat" * 50, b"dog"]
    assert media[0].payload is media[1].payload
    assert media[1].detail == "low"


def test_a_reopened_session_has_its_images_and_the_file_has_each_once(tmp_path: Path) -> None:
    path = tmp_path / "run.journal"
    other_digest = Media("image", "chosen by the caller", b"x" * 10)
    link = Media("image", "url:http://h/p.png", url="http://h/p.png")
    messages = [
        user("one", image(b"cat" * 5000)),
        user("two", image(b"cat" * 5000)),
        user("3", other_digest, link),
    ]
    with Journal(path) as journal:
        for name in ("s", "t"):
            session = Session(name, ToyCodec.chatml(), journal=journal)
            for message in messages:
                commit(session, message)
        recorded = [node.message for node in session.tree.nodes]
    with Journal(path) as journal:
        reopened = Session.reopen("t", ToyCodec.chatml(), journal)
        assert [node.message for node in reopened.tree.nodes] == recorded
        assert [node.message.media for node in reopened.tree.nodes] == [m.media for m in recorded]
        commit(reopened, user("four", image(b"cat" * 5000)))
    with closing(sqlite3.connect(path)) as file:
        assert file.execute("SELECT payload FROM media").fetchall() == [(b"cat" * 5000,)]
        assert sum(len(record) for (record,) in file.execute("SELECT record FROM records")) < 10_000


def test_a_record_without_media_is_unchanged() -> None:
    session = Session("s", ToyCodec.chatml())
    delta = session.tree.plan(session.prepare(Request((Message("user", "q"),))), [Generation(as_ids([65]))])
    assert detach_payloads(delta) == (delta, {})
    assert detach_payloads(delta)[0] is delta
    assert restore_payloads(delta, lambda _: None) is delta
