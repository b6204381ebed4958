"""The main history stays in its conversation, whatever texts it shares with the answers and tasks of
sub-agents without names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from branchline import ExportPolicy, Message, Session, ToolCall, ToyCodec, classify_forks, export_samples
from branchline.timelines.causes import Cause
from tests.timelines.test_causes import CODEC, TOOLS, commit_reply, fork_causes
from tests.timelines.test_main_history import main_text

QUESTION = Message("user", "Which of the rooms has the key?")
LAST = Message("user", "And now the last question.")
EDITS = ["none", "delete_answer", "edit_answer", "edit_first", "edit_question", "edit_result", "clear_result"]


@dataclass(frozen=True)
class Delegated:
    """A conversation whose second turn delegates its question to a sub-agent."""

    messages: list[Message]
    sub_answer: Message


def delegate(session: Session, *, task: str, question: str, result: str = "{}", turns: int = 1) -> Delegated:
    messages = [QUESTION]
    messages += [commit_reply(session, messages, "I have to look for it."), Message("user", question)]
    call = Message("assistant", "", tool_calls=(ToolCall("task", f'{{"prompt": "{task}"}}', "c1"),))
    messages.append(commit_reply(session, messages, call, tools=TOOLS))
    own = [Message("user", task)]
    answer = commit_reply(session, own, "The red room has the only key.")
    for turn in range(1, turns):
        own += [answer, Message("user", "Look again.")]
        answer = commit_reply(session, own, f"The red room had the key in look {turn}.")
    messages.append(Message("tool", result.format(answer.content), tool_call_id="c1"))
    messages.append(commit_reply(session, messages, "It is in the red one.", tools=TOOLS))
    return Delegated(messages, answer)


@pytest.mark.parametrize(("tools", "cause"), [((), Cause.EDIT), (TOOLS, Cause.CONTEXT_DELETE)])
@pytest.mark.parametrize("strip", [False, True])
def test_an_edited_history_that_repeats_a_sub_agents_answer_is_no_compaction(
    strip: bool, tools: tuple[dict[str, object], ...], cause: Cause
) -> None:
    session = Session("s", ToyCodec.chatml(strip_thinking=strip))
    messages = delegate(session, task="Look for the key.", question="Please go on.").messages
    messages[1] = Message("assistant", "[deleted]")
    commit_reply(session, [*messages, LAST], "The last answer.", tools=tools)
    assert main_text(session) == "The last answer."
    assert fork_causes(session)[-1] == cause
    assert Cause.COMPACTION not in {edge.cause for edge in classify_forks(session.tree).edges}


def test_an_edited_history_whose_next_question_quotes_a_sub_agent_goes_on() -> None:
    session = Session("s", CODEC)
    found = delegate(session, task="Look for the key.", question="Please go on.", result="Done.")
    found.messages[1] = Message("assistant", "[deleted]")
    asked = Message("user", f"The tool said: {found.sub_answer.content} Is it true?")
    commit_reply(session, [*found.messages, asked], "The last answer.", tools=TOOLS)
    assert main_text(session) == "The last answer."


@pytest.mark.parametrize("turns", [1, 2])
def test_an_edited_result_that_quotes_a_sub_agent_goes_on(turns: int) -> None:
    session = Session("s", CODEC)
    found = delegate(session, task="Look for the key.", question="Please go on.", turns=turns)
    result = Message("tool", f"Checked: {found.sub_answer.content}", tool_call_id="c1")
    commit_reply(session, [*found.messages[:4], result], "The last answer.", tools=TOOLS)
    assert main_text(session) == "The last answer."
    assert fork_causes(session)[-1] == Cause.EDIT


def test_an_edited_history_whose_question_was_delegated_is_no_sub_agent() -> None:
    session = Session("s", CODEC)
    messages = delegate(session, task="Look for the key.", question="Look for the key.").messages
    messages[1] = Message("assistant", "[deleted]")
    commit_reply(session, [*messages, LAST], "The last answer.", tools=TOOLS)
    assert main_text(session) == "The last answer."
    assert fork_causes(session)[-1] == Cause.CONTEXT_DELETE


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 2**32),
    st.lists(st.tuples(st.integers(0, 2), st.sampled_from(EDITS)), min_size=1, max_size=3),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["", "helper"]),
)
@example(0, [(0, "none"), (1, "delete_answer")], False, False, False, False, "")
@example(1, [(2, "edit_first")], False, True, False, False, "")
@example(2, [(0, "none"), (1, "edit_answer")], True, False, True, False, "")
@example(3, [(1, "none")], False, False, False, True, "")
@example(4, [(1, "none")], False, False, False, True, "helper")
@example(5, [(1, "delete_answer")], True, False, False, False, "")
@example(6, [(1, "delete_answer")], True, False, False, True, "helper")
def test_random_episodes_with_sub_agents_have_the_known_main_history(
    seed: int,
    turns: list[tuple[int, str]],
    same_task: bool,
    strip: bool,
    last_tools: bool,
    has_system_prompt: bool,
    sub_agent: str,
) -> None:
    random = Random(seed)
    session = Session("s", ToyCodec.chatml(strip_thinking=strip))
    system = [Message("system", "You are an agent.")] if has_system_prompt else []
    messages = system[:]
    answers: list[str] = []

    def ask(shown: list[Message], tools: Sequence[Mapping[str, object]] = (), agent: str = "") -> Message:
        answers.append(f"This is answer number {len(answers)}.")
        reasoning = random.choice(["", "I think."])
        reply = Message("assistant", answers[-1], reasoning_content=reasoning)
        return commit_reply(session, shown, reply, tools=tuple(tools), agent=agent)

    for turn, (sub_agents, edit) in enumerate(turns):
        quoted = f" It said: {random.choice(answers)}" if answers and random.random() < 0.3 else ""
        question = f"Question number {turn}, please."
        messages.append(Message("user", question + quoted))
        if sub_agents:
            tasks = [
                question if same_task and not quoted else f"Look for key {turn}",
                f"And for {turn}",
            ]
            calls = [
                ToolCall("task", f'{{"prompt": "{task}"}}', f"c{turn}{index}")
                for index, task in enumerate(tasks[:sub_agents])
            ]
            call = Message("assistant", "", tool_calls=tuple(calls))
            messages.append(commit_reply(session, messages, call, tools=TOOLS))
            for task, one in zip(tasks, calls, strict=False):
                answer = ask([*system, Message("user", task)], agent=sub_agent)
                messages.append(Message("tool", f"Result: {answer.content}", tool_call_id=one.id))
        messages.append(ask(messages, TOOLS))
        messages = edited(messages, edit, random)
    last = ask([*messages, LAST], TOOLS if last_tools else ())
    assert main_text(session) == last.content
    (sample,) = export_samples(
        session.tree, ExportPolicy(max_samples=1, include_missing_logprobs=True)
    ).samples
    ids = session.codec.encode_reply(last)
    assert sample.response_ids[-len(ids) :].tolist() == ids.tolist()


def edited(messages: list[Message], edit: str, random: Random) -> list[Message]:
    role = {"result": "tool", "answer": "assistant"}.get(edit.partition("_")[2], "user")
    places = [
        index for index, message in enumerate(messages) if message.role == role and not message.tool_calls
    ]
    if edit == "none" or not places:
        return messages
    index = places[0] if edit == "edit_first" else random.choice(places)
    old = messages[index]
    text = {"delete_answer": "[deleted]", "clear_result": "[cleared]"}.get(edit, f"{old.content} Changed.")
    return [*messages[:index], Message(old.role, text, tool_call_id=old.tool_call_id), *messages[index + 1 :]]
