"""An image is one placeholder in the toy codec, and no text encodes to it."""

from __future__ import annotations

from branchline import Generation, Message, Request, Session, ToyCodec, export_samples
from branchline.chat.toy import IMAGE
from branchline.core.message import Media
from branchline.core.reader import read_media_part
from branchline.export.samples import ExportPolicy

CODEC = ToyCodec.chatml()
FIRST, SECOND = (Media("image", digest, payload) for digest, payload in (("aa", b"first"), ("bb", b"second")))


def shown(*media: Media) -> Message:
    return Message("user", "see", parts=("see", *media))


def test_images_are_placeholders_with_their_place_and_no_text_is_one() -> None:
    session = Session("s", CODEC)
    typed = Message("user", f"see<image {FIRST.digest}><image>")
    turn = session.prepare(Request((shown(FIRST, SECOND), typed)))
    assert [(span.media, span.length) for span in turn.images] == [(FIRST, 1), (SECOND, 1)]
    assert [turn.prompt_ids[span.offset] for span in turn.images] == [IMAGE, IMAGE]
    assert (turn.prompt_ids == IMAGE).sum() == 2


def test_a_sampled_placeholder_is_no_image() -> None:
    session = Session("s", CODEC)
    question = shown(FIRST)
    ids = CODEC.encode_reply(Message("assistant", parts=(SECOND,)))
    reply = session.commit(session.prepare(Request((question,))), Generation(ids)).call
    answer = session.tree.nodes[reply.outputs[0]].message
    turn = session.prepare(Request((question, answer, shown(SECOND))))
    assert [span.media for span in turn.images] == [FIRST, SECOND]
    assert turn.prompt_ids[turn.images[1].offset + 1 :].tolist().count(IMAGE) == 0


def test_conversations_with_other_images_are_other_branches_and_samples_have_them() -> None:
    session = Session("s", CODEC)
    for media in (FIRST, SECOND):
        session.commit(session.prepare(Request((shown(media),))), Generation(CODEC.encode("ok")))
    samples = export_samples(session.tree, ExportPolicy(include_missing_logprobs=True)).samples
    assert [sample.media for sample in samples] == [(FIRST,), (SECOND,)]
    assert [int((sample.prompt_ids == IMAGE).sum()) for sample in samples] == [1, 1]


def test_media_of_a_link_have_a_place_too() -> None:
    link = read_media_part({"image_url": {"url": "https://images.test/a.png"}}, "image_url")
    (span,) = Session("s", CODEC).prepare(Request((shown(link),))).images
    assert span.media.url == "https://images.test/a.png"
