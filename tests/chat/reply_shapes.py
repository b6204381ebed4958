"""Replies of every shape, and conversations in which a client only appends to them."""

from __future__ import annotations

from dataclasses import dataclass

from branchline import Generation, Message, ToolCall
from branchline.chat.base import HistoryPolicy
from branchline.chat.generic.codec import GenericCodec
from branchline.core.token_arrays import as_ids
from tests.chat.harness import SessionDriver, assistant, user

LOOK_TOOLS = (
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Looks at a place.",
            "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
        },
    },
)
_CALL = ToolCall("look", '{"at": "here"}', "abcdefgh1")
_OTHER_CALL = ToolCall("look", '{"at": "there"}', "abcdefgh2")
REPLY_SHAPES = {
    "text": assistant("hello there"),
    "reasoning_and_text": assistant("hello there", reasoning="hm"),
    "text_that_templates_take_apart": assistant("a </think> b"),
    "empty": assistant(),
    "call": assistant("", _CALL),
    "text_and_call": assistant("I look.", _CALL),
    "reasoning_and_call": assistant("", _CALL, reasoning="hm so"),
    "reasoning_text_and_call": assistant("I look.", _CALL, reasoning="hm so"),
    "two_calls": assistant("", _CALL, _OTHER_CALL),
    "text_and_two_calls": assistant("I look.", _CALL, _OTHER_CALL),
    "cut_text": assistant("hello the"),
    "cut_reasoning": assistant(reasoning="hm so"),
    "cut_call": assistant('I look. <tool_call>{"na'),
    "cut_at_once": assistant(),
}


@dataclass(frozen=True)
class PlayedTurn:
    """One call after the first: whether it continues the last reply, and the text it added."""

    continues: bool
    new_messages: tuple[Message, ...]
    added_text: str


def play_shape(codec: GenericCodec, shape: str, history: HistoryPolicy) -> list[PlayedTurn]:
    """Plays three calls in which the model replies in one shape and the client appends results and questions.

    Sampled ids that the template does not write itself are allowed: the record decides, not the template.
    """
    reply = REPLY_SHAPES[shape]
    driver = SessionDriver(codec, history=history)
    stop = min(codec.profile(tools=True).terminator_ids | codec.profile().terminator_ids, default=None)
    is_cut = shape.startswith("cut")
    ids = driver.encode(_spell(codec, reply, is_cut=is_cut))
    if not is_cut and stop is not None:
        ids.append(stop)
    conversation = [user("first question")]
    new: tuple[Message, ...] = ()
    turns = []
    node = None
    for number in range(3):
        turn = driver.prepare(*conversation, tools=LOOK_TOOLS)
        if node is not None:
            added = driver.decode(turn.prompt_ids.tolist()[turn.parent.end :])
            turns.append(PlayedTurn(turn.parent is node, new, added))
        finish_reason = "length" if is_cut else "stop"
        generation = Generation(as_ids(ids), message=reply, finish_reason=finish_reason)
        node = driver.session.tree.nodes[driver.session.commit(turn, generation).call.outputs[0]]
        results = [Message("tool", f"seen {c.id}", tool_call_id=c.id, name="look") for c in reply.tool_calls]
        question = [user(f"question {number}")] if number or not results else []
        new = (*results, *question)
        conversation += [reply, *new]
    return turns


def _spell(codec: GenericCodec, reply: Message, *, is_cut: bool) -> str:
    """Returns a reply in the template's own format, or as much of it as the template shows after plain text
    of the rest."""
    rendered = None if is_cut else codec.render_reply(reply)
    if rendered is not None and reply.content in rendered[0] and reply.reasoning_content in rendered[0]:
        return rendered[0]
    calls = codec.render_reply(assistant("", *reply.tool_calls)) if reply.tool_calls else None
    return " ".join(filter(None, [reply.reasoning_content, reply.content, calls[0] if calls else ""]))
