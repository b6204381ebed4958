"""The same request in every protocol."""

from __future__ import annotations

import json
from typing import Any

import httpx

from tests.gateway.harness import Agent

BODIES: dict[str, Any] = {
    "chat/completions": lambda text: {"messages": [{"role": "user", "content": text}]},
    "completions": lambda text: {"prompt": text},
    "responses": lambda text: {"input": text},
    "messages": lambda text: {"messages": [{"role": "user", "content": text}]},
}
PROTOCOLS = tuple(BODIES)


def request(a: Agent, protocol: str, text: str, **body: Any) -> httpx.Request:
    """A request in which a user says this."""
    return a.http.build_request(
        "POST",
        f"{a.session.base_url}/{protocol}",
        json={"model": "toy", **BODIES[protocol](text), **body},
        headers={"authorization": f"Bearer {a.session.api_key}"},
    )


async def post(a: Agent, protocol: str, text: str, **body: Any) -> httpx.Response:
    return await a.http.send(request(a, protocol, text, **body))


def events_in(stream: str) -> list[dict[str, Any]]:
    """The events of a stream, whatever they are called."""
    lines = [line for line in stream.split("\n") if line.startswith("data: {")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]
