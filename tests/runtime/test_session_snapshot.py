"""A snapshot of a session: what another process reads equals what the gateway has, id by id."""

from __future__ import annotations

from random import Random

import msgspec
import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from branchline import ExportPolicy, Message, Sample, Session, ToyCodec, Tree
from branchline.core.call import Delivery
from branchline.core.errors import InputError
from branchline.core.message import Media
from branchline.export.jsonl import sample_to_json
from branchline.runtime.managed_session import SessionOptions
from branchline.runtime.session_snapshot import SessionSnapshot, count_answered_calls
from branchline.runtime.session_store import SessionStore
from branchline.testing.plan_runner import PlanRunner, causal_order
from branchline.testing.plans import PlanGenerator
from branchline.tree.tree import encode_record
from tests.timelines.test_causes import commit_reply
from tests.tree.session_driver import SessionDriver, user


def as_json(samples: list[Sample] | tuple[Sample, ...]) -> list[bytes]:
    return [msgspec.json.encode(sample_to_json(sample)) for sample in samples]


def assert_equal_trees(one: Tree, other: Tree) -> None:
    assert [encode_record(call) for call in one.calls] == [encode_record(call) for call in other.calls]
    assert one.deliveries == other.deliveries
    assert len(one.nodes) == len(other.nodes)
    for left, right in zip(one.nodes[1:], other.nodes[1:], strict=True):
        assert left.parent is not None
        assert right.parent is not None
        assert (left.id, left.parent.id, left.key) == (right.id, right.parent.id, right.key)
        assert (left.message, left.spans, left.agent) == (right.message, right.spans, right.agent)
        assert (left.start, left.end, left.depth) == (right.start, right.end, right.depth)
        assert (left.source_id, left.ends_sampled) == (right.source_id, right.ends_sampled)
        assert np.array_equal(left.ids, right.ids)
        assert (left.sampled_ids is None) == (right.sampled_ids is None)
        assert left.sampled_ids is None or np.array_equal(left.sampled_ids, right.sampled_ids)  # type: ignore[arg-type]
        assert encode_record(left.output) == encode_record(right.output)
    assert one.sampled_by_key.keys() == other.sampled_by_key.keys()


def copy_over_the_wire(snapshot: SessionSnapshot) -> SessionSnapshot:
    return SessionSnapshot.decode(snapshot.encode())


@settings(max_examples=60)
@given(st.integers(0, 2**32), st.integers(0, 8), st.booleans(), st.sampled_from(["split", "first", "all"]))
def test_a_decoded_snapshot_has_the_same_tree_samples_and_trajectory(
    seed: int, count: int, think: bool, shares: str
) -> None:
    rng = Random(seed)
    codec = ToyCodec.chatml(strip_thinking=think)
    runner = PlanRunner(Session("s", codec), codec)
    plan = PlanGenerator(rng, reasoning=think).generate(count)
    runner.run(plan, causal_order(plan, rng), overlap=rng)
    rewards = ({"score": 0.5}, {"score": 0.25, "turn": 1, "id": "a"})
    snapshot = SessionSnapshot("s", runner.session.snapshot(), "finalized", "done", rewards, group="g")
    copy = copy_over_the_wire(snapshot)
    assert_equal_trees(snapshot.tree, copy.tree)
    policy = ExportPolicy(shares=shares)  # type: ignore[arg-type]
    for wanted in (None, policy):
        one, other = snapshot.export(wanted), copy.export(wanted)
        assert as_json(one.samples) == as_json(other.samples)
        assert (one.report, one.trained_nodes) == (other.report, other.trained_nodes)
    left, right = snapshot.trajectory(), copy.trajectory()
    assert as_json(left.samples) == as_json(right.samples)
    assert (left.history, left.additional_histories) == (right.history, right.additional_histories)
    assert (left.reward, left.report, left.parent_answers) == (
        right.reward,
        right.report,
        right.parent_answers,
    )
    assert (copy.id, copy.state, copy.reason, copy.group) == ("s", "finalized", "done", "g")
    assert copy.rewards == rewards


def test_logprobs_that_json_cannot_hold_stay_exact() -> None:
    driver = SessionDriver()
    driver.sample([user("p")], "xy")
    node = driver.tree.nodes[-1]
    assert node.output is not None
    logprobs = np.array([-np.inf, np.nan], np.float32)
    node.output = msgspec.structs.replace(node.output, logprobs=logprobs)
    copy = copy_over_the_wire(SessionSnapshot("s", driver.tree))
    output = copy.tree.nodes[-1].output
    assert output is not None
    assert output.logprobs is not None
    assert output.logprobs.tobytes() == logprobs.tobytes()


def test_an_image_is_sent_once_and_shared_by_the_messages_that_have_it() -> None:
    payload = bytes(range(256)) * 400
    image = Media("image", xxhash.xxh3_128_hexdigest(payload), payload)
    driver = SessionDriver()
    first, second = (Message("user", text, parts=(text, image)) for text in ("one ", "two "))
    for message in (first, second):
        driver.sample([message], "x")
    data = SessionSnapshot("s", driver.session.snapshot()).encode()
    assert len(data) < 2 * len(payload)
    found = [part for node in SessionSnapshot.decode(data).tree.nodes for part in node.message.media]
    assert [part.payload for part in found] == [payload, payload]
    assert found[0].payload is found[1].payload


def test_evaluation_and_aborted_sessions_export_nothing_and_aborted_ones_have_failed() -> None:
    driver = SessionDriver()
    driver.sample([user("p")], "x")
    policy = ExportPolicy(include_missing_logprobs=True)
    for snapshot, reason in (
        (SessionSnapshot("s", driver.tree, "finalized", is_eval=True, export_policy=policy), "evaluation"),
        (SessionSnapshot("s", driver.tree, "aborted", export_policy=policy), "aborted"),
    ):
        copy = copy_over_the_wire(snapshot)
        assert [dropped.reason for dropped in copy.export().report.dropped] == [reason]
        assert not copy.export().samples
        assert not copy.trajectory().samples
        assert copy.trajectory().failed == (reason == "aborted")
    assert len(snapshot.export(include_aborted=True).samples) == 1


@pytest.mark.parametrize("strip", [False, True])
def test_a_cut_answer_that_a_later_call_shows_was_answered(strip: bool) -> None:
    session = Session("s", ToyCodec.chatml(strip_thinking=strip))
    thought = Message("assistant", "Three.", reasoning_content="I count.")
    cut = commit_reply(session, [user("p")], thought, delivery=Delivery.CANCELLED)
    assert count_answered_calls(session.tree) == 0
    commit_reply(session, [user("p"), cut, user("Go on.")], "Four.", delivery=Delivery.CANCELLED)
    assert count_answered_calls(session.tree) == 1


def test_a_managed_session_exports_through_its_snapshot_with_its_own_defaults() -> None:
    store = SessionStore(ToyCodec())
    managed, _, _ = store.open(SessionOptions(group="g", metadata={"a": [1]}, dedupe=True, ignore_tools=True))
    copy = copy_over_the_wire(managed.snapshot())
    assert copy.export_policy == managed.default_export_policy
    assert (copy.group, copy.metadata) == ("g", {"a": [1]})
    assert (copy.export().samples, copy.export().report) == ([], managed.export().report)


@pytest.mark.parametrize("data", [b"", b"<html>", b"\x81\xa6format\x01"])
def test_bytes_of_another_form_are_refused(data: bytes) -> None:
    with pytest.raises(InputError, match="snapshot: got"):
        SessionSnapshot.decode(data)


def test_a_newer_format_is_refused_by_its_number() -> None:
    with pytest.raises(InputError, match="format: got 99, expected 1"):
        SessionSnapshot.decode(msgspec.msgpack.encode({"format": 99, "shape": "unknown"}))
