"""Requests in every protocol, a client of Responses, and one conversation over several protocols."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import httpx

from branchline import Message, ToolCall, ToyCodec
from branchline.engines.scripted import ScriptedEngine, replies
from branchline.testing.reply_encoder import TemplateReplyEncoder
from tests.chat.families import load_codec
from tests.gateway.harness import Agent

BODIES: dict[str, Any] = {
    "chat/completions": lambda text: {"messages": [{"role": "user", "content": text}]},
    "completions": lambda text: {"prompt": text},
    "responses": lambda text: {"input": text},
    "messages": lambda text: {"messages": [{"role": "user", "content": text}]},
}
PROTOCOLS = tuple(BODIES)


def request(a: Agent, protocol: str, text: str, **body: Any) -> httpx.Request:
    """A request with one user message or prompt."""
    return a.http.build_request(
        "POST",
        f"{a.session.base_url}/{protocol}",
        json={"model": "toy", **BODIES[protocol](text), **body},
        headers={"authorization": f"Bearer {a.session.api_key}"},
    )


async def post(a: Agent, protocol: str, text: str, **body: Any) -> httpx.Response:
    return await a.http.send(request(a, protocol, text, **body))


def events_in(stream: str) -> list[dict[str, Any]]:
    """The events of a stream, without their names."""
    lines = [line for line in stream.split("\n") if line.startswith("data: {")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


# -- the Responses protocol --------------------------------------------------------------------------

SCHEMA = {"type": "object", "properties": {"at": {"type": "integer"}}}
CHAT_TOOLS = [
    {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": SCHEMA}}
]
TOOLS = [{"type": "function", "name": "look", "description": "Look.", "parameters": SCHEMA, "strict": None}]
SYSTEM = "Be brief."
QUESTIONS = ("What is there?", "And now?")
REPLIES = (
    Message(
        "assistant", reasoning_content="Two places.", tool_calls=(_a := ToolCall("look", '{"at": 1}'), _a)
    ),
    Message(
        "assistant", "Once more.", reasoning_content="Not sure.", tool_calls=(ToolCall("look", '{"at": 2}'),)
    ),
    Message("assistant", "A door, grüße 🙂", reasoning_content="It is a door."),
    Message("assistant", "Still a door."),
)
"""The replies of a scripted model: two parallel calls, a call with text, an answer; after the second question
another answer."""


class TemplateEngine(ScriptedEngine):
    """A scripted engine that encodes its replies as a model family's template and tokenizer do."""

    def __init__(self, family: str, seed: int = 7) -> None:
        codec = load_codec(family)
        encoder = TemplateReplyEncoder(codec, Random(seed))

        class ReplyCodec:
            decode = staticmethod(codec.decode)
            encode_reply = staticmethod(encoder.encode_reply)

        super().__init__(ReplyCodec(), replies(*REPLIES))  # type: ignore[arg-type]


def engine_of(family: str) -> tuple[ScriptedEngine, Any]:
    """A scripted engine and the codec of its gateway."""
    if family == "toy":
        codec = ToyCodec.chatml()
        return ScriptedEngine(codec, replies(*REPLIES)), codec
    return TemplateEngine(family), load_codec(family)


async def post_responses(a: Agent, input: Any, **body: Any) -> httpx.Response:
    """Posts a request of the Responses protocol."""
    return await a.http.post(
        f"{a.session.base_url}/responses",
        json={"model": "toy", "input": input, **body},
        headers={"authorization": f"Bearer {a.session.api_key}"},
    )


async def respond(a: Agent, input: Any, **body: Any) -> dict[str, Any]:
    """The response to a request that must succeed; of a stream, the response in its last event."""
    response = await post_responses(a, input, **body)
    assert response.status_code == 200, response.text
    if not body.get("stream"):
        complete: dict[str, Any] = response.json()
        return complete
    last: dict[str, Any] = parse_events(response.text)[-1]["response"]
    return last


def parse_events(text: str) -> list[dict[str, Any]]:
    """The events of a stream; their names are their types, and they are numbered."""
    events = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def response_parts(response: dict[str, Any]) -> tuple[str, str, list[str]]:
    """The text, the reasoning and the calls of a response."""
    text = reasoning = ""
    calls = []
    for item in response["output"]:
        if item["type"] == "message":
            text += "".join(part["text"] for part in item["content"])
        elif item["type"] == "reasoning":
            reasoning += "".join(part["text"] for part in [*item["content"], *item["summary"]])
        else:
            calls.append(f"{item['name']} {item.get('arguments', item.get('input'))}")
    return text, reasoning, calls


# -- the same conversation over each protocol --------------------------------------------------------


async def over_chat(a: Agent, *, stream: bool) -> None:
    messages: list[Any] = [{"role": "system", "content": SYSTEM}]
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        while True:
            if stream:
                message = _join_chunks(await a.stream(*messages, tools=CHAT_TOOLS))
            else:
                response = await a.ask(*messages, tools=CHAT_TOOLS)
                message = response.json()["choices"][0]["message"]
            messages.append(message)
            if not message.get("tool_calls"):
                break
            for call in message["tool_calls"]:
                result = f"saw {call['function']['arguments']}"
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})


def _join_chunks(events: list[dict[str, Any]]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": "", "reasoning_content": "", "tool_calls": []}
    for event in events:
        delta = event["choices"][0]["delta"]
        message["content"] += delta.get("content") or ""
        message["reasoning_content"] += delta.get("reasoning_content") or ""
        message["tool_calls"] += delta.get("tool_calls") or []
    return message


async def over_responses(a: Agent, *, stream: bool, by_id: bool = False, **body: Any) -> None:
    """`by_id`: only new items are sent, with `previous_response_id`."""
    items: list[Any] = []
    previous = None
    for question in QUESTIONS:
        items.append({"role": "user", "content": [{"type": "input_text", "text": question}]})
        while True:
            response = await respond(
                a,
                items,
                instructions=SYSTEM,
                tools=TOOLS,
                stream=stream,
                previous_response_id=previous,
                **body,
            )
            items = [] if by_id else items + response["output"]
            previous = response["id"] if by_id else None
            calls = [item for item in response["output"] if item["type"] == "function_call"]
            for call in calls:
                result = f"saw {call['arguments']}"
                items.append({"type": "function_call_output", "call_id": call["call_id"], "output": result})
            if not calls:
                break
