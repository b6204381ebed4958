"""Server-sent events of every protocol."""

from __future__ import annotations

import json
from typing import Any

import pytest

from branchline import ToyCodec
from tests.gateway.harness import agent, run
from tests.gateway.protocols.protocol_clients import PROTOCOLS, post

ODD = "one\u2028two\u2029three\x85four grüße 🙂 \x0b\x0c\x1c end"


def _text(event: dict[str, Any]) -> str:
    if "choices" in event:
        choice = event["choices"][0]
        return str(choice.get("text") or choice.get("delta", {}).get("content") or "")
    delta = event.get("delta", "")
    return str(delta.get("text", "")) if isinstance(delta, dict) else str(delta)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_no_event_contains_a_line_separator(protocol: str) -> None:
    async def test() -> None:
        async with agent(ODD, codec=ToyCodec.chatml()) as a:
            response = await post(a, protocol, "q", stream=True)
            lines = response.content.decode().splitlines()
            assert all(line.startswith(("data: ", "event: ")) for line in lines if line)
            events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
            assert "".join(map(_text, events)) == ODD
            assert _text_of_response((await post(a, protocol, "q")).json()) == ODD

    run(test)


def _text_of_response(answer: dict[str, Any]) -> str:
    if "choices" in answer:
        choice = answer["choices"][0]
        return str(choice.get("text") or choice["message"]["content"])
    parts = answer["output"][0]["content"] if "output" in answer else answer["content"]
    return str(parts[0]["text"])
