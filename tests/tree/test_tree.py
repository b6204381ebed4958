"""The tree: prepare looks, commit adds, siblings are siblings."""

from __future__ import annotations

import numpy as np
import pytest

from branchline import (
    Delivery,
    Generation,
    Media,
    Message,
    Request,
    Session,
    ToolCall,
    ToyCodec,
    Tree,
    TreeError,
    export_samples,
    timelines_of,
)
from branchline.core.call import AppliedEquivalence
from branchline.core.echo import Equivalence
from branchline.core.reader import read_message
from branchline.core.token_arrays import as_ids
from branchline.tree.node import Node

CODEC = ToyCodec()
TOOL = {"type": "function", "function": {"name": "look"}}


def user(text: str) -> Message:
    return Message("user", text)


def assistant(text: str) -> Message:
    return Message("assistant", text)


class SessionDriver:
    """A session driven by hand."""

    def __init__(self, codec: ToyCodec = CODEC, **options: object) -> None:
        self.codec = codec
        self.session = Session("s", codec, **options)  # type: ignore[arg-type]

    @property
    def tree(self) -> Tree:
        return self.session.tree

    def sample(self, messages: list[Message], *said: Message | str, **about: object) -> Node:
        turn = self.session.prepare(Request(tuple(messages), **about))  # type: ignore[arg-type]
        answers = [Message("assistant", one) if isinstance(one, str) else one for one in said]
        generations = [Generation(self.codec.encode_reply(answer), message=answer) for answer in answers]
        call = self.session.commit(turn, *generations).call
        return self.tree.nodes[call.outputs[0]]

    def prepare(self, *messages: Message, **about: object):  # type: ignore[no-untyped-def]
        return self.session.prepare(Request(messages, **about))  # type: ignore[arg-type]


def test_the_next_prompt_extends_the_sampled_ids() -> None:
    talk = SessionDriver()
    talk.sample([user("p")], "A1")
    turn = talk.prepare(user("p"), assistant("A1"), user("x"))
    assert talk.codec.decode(turn.prompt_ids) == "user:p\nassistant:A1user:x\nassistant:"
    assert turn.encoded_tokens == 17


def test_choices_of_one_call_are_siblings() -> None:
    talk = SessionDriver()
    node = talk.sample([user("p")], "one", "two", "three")
    call = talk.tree.call_of(node)
    assert len(call.outputs) == 3
    assert [talk.tree.nodes[output].output.choice_index for output in call.outputs] == [0, 1, 2]  # type: ignore[union-attr]


def test_two_identical_requests_in_flight_become_two_siblings() -> None:
    talk = SessionDriver()
    first, second = talk.prepare(user("p")), talk.prepare(user("p"))
    for turn, text in ((first, "one"), (second, "two")):
        talk.session.commit(turn, Generation(CODEC.encode_reply(assistant(text))))
    (context,) = talk.tree.root.all_children()
    assert [child.message.content for child in context.all_children()] == ["one", "two"]


def test_the_longest_path_wins_where_a_greedy_walk_would_fork() -> None:
    talk = SessionDriver()
    talk.sample([user("p")], "same")
    second = talk.sample([user("p")], Message("assistant", "same", id="resp_2"))
    echoed = Message("assistant", "same", id="resp_2")
    deep = talk.sample([user("p"), echoed, user("q")], "deep")
    turn = talk.prepare(user("p"), assistant("same"), user("q"), assistant("deep"), user("r"))
    assert turn.parent is deep
    assert second in deep.path()
    assert not turn.ambiguous_match


def test_an_answer_known_to_have_arrived_is_preferred_to_one_that_was_lost() -> None:
    talk = SessionDriver()
    lost = talk.sample([user("p")], "same")
    talk.session.record_delivery(talk.tree.call_of(lost), Delivery.LOST)
    arrived = talk.sample([user("p")], "same")
    talk.session.record_delivery(talk.tree.call_of(arrived))
    assert talk.prepare(user("p"), assistant("same"), user("q")).parent is arrived


def test_a_cancelled_answer_that_comes_back_is_found_all_the_same() -> None:
    talk = SessionDriver()
    cut = talk.sample([user("p")], "half of")
    talk.session.record_delivery(talk.tree.call_of(cut), Delivery.CANCELLED)
    assert talk.prepare(user("p"), assistant("half of"), user("q")).parent is cut


def test_another_agents_reply_is_context_and_its_ids_are_reused() -> None:
    talk = SessionDriver()
    said = talk.sample([user("p")], "mine", agent="a")
    turn = talk.prepare(user("p"), assistant("mine"), user("q"), agent="b")
    assert turn.parent.message.content == "p"
    assert turn.source_ids == (said.id, -1)
    assert turn.message_tokens[0].ids.tolist() == said.ids.tolist()
    assert all(origin != 2 for _, origin in turn.message_tokens[0].spans)


def test_other_tools_or_template_arguments_start_a_sibling() -> None:
    talk = SessionDriver()
    talk.sample([user("p")], "A")
    with_tools = talk.prepare(user("p"), tools=(TOOL,))
    assert with_tools.parent is talk.tree.root
    with_arguments = talk.prepare(user("p"), chat_template_kwargs={"enable_thinking": False})
    assert with_arguments.parent is talk.tree.root
    assert talk.prepare(user("p")).parent.message.content == "p"


def test_a_rewritten_reply_is_a_new_branch_and_nothing_is_lost() -> None:
    talk = SessionDriver()
    said = talk.sample([user("p")], "original")
    new = talk.sample([user("p"), assistant("rewritten"), user("q")], "end")
    rewritten = new.path()[1]
    assert rewritten.output is None
    assert rewritten.source_id == -1
    assert said in talk.tree.leaves()


def test_thinking_is_stripped_on_a_new_branch_where_it_stood() -> None:
    talk = SessionDriver(ToyCodec.chatml(strip_thinking=True))
    thought = Message("assistant", "answer", reasoning_content="plan")
    said = talk.sample([user("p")], thought)
    turn = talk.prepare(user("p"), assistant("answer"), user("q"))
    assert turn.rewrite_reason == "think_strip"
    assert turn.parent.message.content == "p"
    assert turn.source_ids == (said.id, -1)
    assert "plan" not in talk.codec.decode(turn.prompt_ids)


def test_verbatim_history_keeps_thinking_on_one_growing_path() -> None:
    talk = SessionDriver(ToyCodec.chatml(strip_thinking=True), history="verbatim")
    said = talk.sample([user("p")], Message("assistant", "answer", reasoning_content="plan"))
    turn = talk.prepare(user("p"), assistant("answer"), user("q"))
    assert turn.parent is said
    assert "plan" in talk.codec.decode(turn.prompt_ids)


def test_a_reply_inside_a_tool_cycle_keeps_its_thinking() -> None:
    talk = SessionDriver(ToyCodec.chatml(strip_thinking=True))
    call = Message("assistant", "", reasoning_content="plan", tool_calls=(ToolCall("look", "{}", "c1"),))
    said = talk.sample([user("p")], call)
    turn = talk.prepare(user("p"), call, Message("tool", "seen", tool_call_id="c1"))
    assert turn.parent is said


def test_versions_logprobs_and_routed_experts_are_kept_per_token() -> None:
    talk = SessionDriver()
    turn = talk.prepare(user("p"))
    routed = np.arange(6, dtype=np.uint8).reshape(3, 2)
    generation = Generation(
        as_ids([65, 66, 67]), np.array([-1, -2, -3], np.float32), np.array([4, 4, 5]), routed_experts=routed
    )
    call = talk.session.commit(turn, generation).call
    output = talk.tree.nodes[call.outputs[0]].output
    assert output is not None
    assert output.versions == ((2, 4), (1, 5))
    assert output.logprobs is not None
    assert output.logprobs.tolist() == [-1, -2, -3]
    assert output.routed_experts is not None
    assert output.routed_experts.tolist() == routed.tolist()


@pytest.mark.parametrize(
    ("generation", "problem"),
    [
        (Generation(as_ids([1, 2]), np.zeros(1, np.float32)), "logprobs: got 1 for 2 sampled ids"),
        (Generation(as_ids([1, 2]), versions=np.array([1])), "versions: got 1 for 2 sampled ids"),
        (Generation(as_ids([1, 2]), routed_experts=np.zeros((3, 1), np.uint8)), "routed_experts: got 3 rows"),
    ],
)
def test_a_generation_that_does_not_line_up_is_refused_and_changes_nothing(
    generation: Generation, problem: str
) -> None:
    talk = SessionDriver()
    turn = talk.prepare(user("p"))
    with pytest.raises(TreeError, match=problem):
        talk.session.commit(turn, generation)
    assert len(talk.tree.nodes) == 1
    assert not talk.tree.calls


def test_media_travel_along_the_path_and_tell_messages_apart() -> None:
    talk = SessionDriver()
    cat = Message("user", "look", parts=("look", Media("image", "cat", b"...")))
    dog = Message("user", "look", parts=("look", Media("image", "dog", b"...")))
    said = talk.sample([cat], "a cat")
    assert talk.prepare(cat, assistant("a cat"), user("q")).parent is said
    assert talk.prepare(dog).parent is talk.tree.root
    assert said.path()[0].message.media[0].payload == b"..."


def test_a_plan_that_another_commit_overtook_is_refused() -> None:
    tree = Tree()
    turn = tree.prepare(Request((user("p"),)), CODEC)
    plans = [tree.plan(turn, [Generation(CODEC.encode_reply(assistant(text)))]) for text in ("one", "two")]
    tree.apply(plans[0])
    with pytest.raises(TreeError, match="another commit came between"):
        tree.apply(plans[1])
    assert len(tree.calls) == 1


CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "look", "arguments": '{"at": 1, "far": false}'},
}
OTHER = {"id": "call_2", "type": "function", "function": {"name": "hear", "arguments": "{}"}}
SENT = {"role": "assistant", "content": None, "tool_calls": [CALL, OTHER]}


def reserialised_call(arguments: str) -> dict[str, object]:
    return {**CALL, "function": {"name": "look", "arguments": arguments}}


@pytest.mark.parametrize(
    ("shown", "reason"),
    [
        ({**SENT, "content": ""}, Equivalence.EMPTY_CONTENT),
        ({key: value for key, value in SENT.items() if key != "content"}, Equivalence.EMPTY_CONTENT),
        ({**SENT, "tool_calls": [{**CALL, "id": "x"}, {**OTHER, "id": "y"}]}, Equivalence.RENAMED_IDS),
        (
            {**SENT, "tool_calls": [reserialised_call('{"far":false,"at":1}'), OTHER]},
            Equivalence.ARGUMENTS_RESERIALISED,
        ),
        (
            {**SENT, "tool_calls": [reserialised_call("{'at': 1, 'far': False}"), OTHER]},
            Equivalence.PYTHON_LITERALS,
        ),
        ({**SENT, "tool_calls": [OTHER, CALL]}, Equivalence.REORDERED_CALLS),
    ],
)
def test_b4_what_clients_do_to_a_tool_call_is_tolerated_and_named(
    shown: dict[str, object], reason: Equivalence
) -> None:
    talk = SessionDriver()
    said = talk.sample([user("p")], read_message(SENT))
    result = Message("tool", "seen")
    turn = talk.prepare(user("p"), read_message(shown), result)
    assert turn.parent is said
    assert turn.applied_equivalences == (AppliedEquivalence(1, reason),)
    assert len(talk.tree.leaves()) == 1


@pytest.mark.parametrize(
    ("shown", "reason"),
    [
        ({"role": "assistant", "content": [{"type": "text", "text": "hi there "}]}, Equivalence.PART_LIST),
        (
            {"role": "assistant", "content": "hi there", "reasoning_content": "hm"},
            Equivalence.TRIMMED_WHITESPACE,
        ),
        ({"role": "assistant", "content": "hi there "}, Equivalence.DROPPED_REASONING),
        (
            {"role": "assistant", "content": "hi there ", "tool_calls": None, "thinking": "hm"},
            Equivalence.EMPTY_CALLS,
        ),
    ],
)
def test_b4_what_clients_do_to_a_text_is_tolerated_and_named(
    shown: dict[str, object], reason: Equivalence
) -> None:
    talk = SessionDriver()
    said = talk.sample([user("p")], Message("assistant", "hi there ", reasoning_content="hm"))
    turn = talk.prepare(user("p"), read_message(shown), user("q"))
    assert turn.parent is said
    assert reason in [echo.equivalence for echo in turn.applied_equivalences]


def test_b4_an_empty_tool_list_is_no_tool_list_and_is_recorded() -> None:
    talk = SessionDriver()
    said = talk.sample([user("p")], "A")
    body = {
        "messages": [{"role": "user", "content": "p"}, {"role": "assistant", "content": "A"}],
        "tools": [],
    }
    turn = talk.session.prepare(Request.read(body))
    assert turn.parent is said
    assert turn.applied_equivalences == (AppliedEquivalence(-1, Equivalence.EMPTY_TOOLS),)


def test_results_of_reordered_calls_go_back_to_the_sampled_order() -> None:
    talk = SessionDriver()
    said = talk.sample([user("p")], read_message(SENT))
    results = [
        Message("tool", "heard", tool_call_id="call_2"),
        Message("tool", "seen", tool_call_id="call_1"),
    ]
    turn = talk.prepare(user("p"), read_message({**SENT, "tool_calls": [OTHER, CALL]}), *results)
    assert turn.parent is said
    assert [message.content for message in turn.messages] == ["seen", "heard"]
    in_call_order = talk.prepare(user("p"), read_message(SENT), *results)
    assert [message.content for message in in_call_order.messages] == ["seen", "heard"]
    assert in_call_order.applied_equivalences == (AppliedEquivalence(1, Equivalence.REORDERED_RESULTS),)


def test_results_go_back_to_the_sampled_order_behind_a_reply_shown_elsewhere_too() -> None:
    talk = SessionDriver()
    talk.sample([user("p"), assistant("bad"), user("error")], read_message(SENT))
    results = [
        Message("tool", "heard", tool_call_id="call_2"),
        Message("tool", "seen", tool_call_id="call_1"),
    ]
    turn = talk.prepare(user("p"), read_message({**SENT, "tool_calls": [OTHER, CALL]}), *results)
    assert [message.content for message in turn.messages][1:] == ["seen", "heard"]


def test_an_assistant_message_nobody_sampled_is_context_anywhere() -> None:
    talk = SessionDriver()
    said = talk.sample([user("example"), assistant("sure"), user("p")], "A")
    assert [node.is_sampled for node in said.path()] == [False, False, False, True]
    prefill = talk.prepare(user("p"), assistant("It starts with"))
    assert prefill.parent is talk.tree.root


def test_agents_that_share_a_history_get_the_same_timelines_in_every_order() -> None:
    sets = []
    for order in ("ab", "ba"):
        talk = SessionDriver()
        talk.sample([user("u")], "hello", agent="a")
        for agent in order:
            talk.sample([user("u"), assistant("hello"), user("u2")], f"from {agent}", agent=agent)
        sets.append(sorted((line.ids.tobytes(), line.mask.tobytes()) for line in timelines_of(talk.tree)))
    assert sets[0] == sets[1]
    assert len(sets[0]) == 2


def test_another_agents_thinking_never_enters_a_prompt() -> None:
    talk = SessionDriver(ToyCodec.chatml())
    talk.sample(
        [user("is it safe?")], Message("assistant", "Yes.", reasoning_content="secret plan"), agent="main"
    )
    turn = talk.prepare(user("2+2=4?"), assistant("Yes."), user("3+3=6?"), agent="judge")
    assert "secret" not in talk.codec.decode(turn.prompt_ids)


def test_a_tree_keeps_copies_of_what_an_engine_may_reuse() -> None:
    talk = SessionDriver()
    logprobs, experts = np.zeros(10, np.float32), np.ones((3, 2), np.int16)
    generation = Generation(as_ids([1, 2, 3]), logprobs[:3], message=assistant("x"), routed_experts=experts)
    call = talk.session.commit(talk.prepare(user("u")), generation).call
    logprobs[:], experts[:] = 9, 7
    output = talk.tree.nodes[call.outputs[0]].output
    assert output is not None
    assert output.logprobs is not None
    assert output.logprobs.tolist() == [0, 0, 0]
    (line,) = timelines_of(talk.tree)
    assert line.routed_experts is not None
    assert line.routed_experts[-3:].tolist() == [[1, 1]] * 3
    (sample,) = export_samples(talk.tree).samples
    assert sample.routed_experts is not None
    assert len(sample.routed_experts) == len(sample.response_ids)


@pytest.mark.parametrize("version", [-1, 2**31])
def test_a_version_that_no_array_can_hold_is_refused(version: int) -> None:
    talk = SessionDriver()
    with pytest.raises(TreeError, match="versions: got"):
        talk.session.commit(talk.prepare(user("u")), Generation(as_ids([1]), versions=version))
