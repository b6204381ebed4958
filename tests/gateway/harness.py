"""A gateway on loopback for tests: real HTTP, a scripted engine, a toy codec."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from branchline.chat.base import Codec
from branchline.chat.toy import ToyCodec
from branchline.engines.scripted import ReplyRule, ScriptedEngine, replies
from branchline.gateway.config import GatewayConfig
from branchline.gateway.server import Gateway, GatewaySession
from tests.hang import HANG_S, fail_if_hung

AsyncTest = Callable[[], Coroutine[Any, Any, None]]


def run(test: AsyncTest, loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None) -> None:
    """Runs an async test, and fails if it hangs."""
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(fail_if_hung(test()))


@dataclass
class Agent:
    """A client of one session."""

    gateway: Gateway
    session: GatewaySession
    http: httpx.AsyncClient
    engine: ScriptedEngine

    @property
    def api_headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.session.api_key}"}

    @property
    def control_headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.session.control_key}"}

    @property
    def admin_headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.gateway.admin_key}"}

    async def ask(
        self, *messages: Any, key: str | None = None, headers: Any = None, **body: Any
    ) -> httpx.Response:
        """Posts a chat completion; strings are user and assistant messages in turn."""
        wire_messages = [_message(index, message) for index, message in enumerate(messages)]
        return await self.http.post(
            f"{self.session.base_url}/chat/completions",
            json={"model": "toy", "messages": wire_messages, **body},
            headers={"authorization": f"Bearer {key or self.session.api_key}", **(headers or {})},
        )

    async def ask_text(self, *messages: Any, **body: Any) -> str:
        """The text of the answer to a request that must succeed."""
        response = await self.ask(*messages, **body)
        assert response.status_code == 200, response.text
        content = response.json()["choices"][0]["message"]["content"]
        return content or ""

    async def stream(self, *messages: Any, **body: Any) -> list[dict[str, Any]]:
        """The events of a streamed answer."""
        response = await self.ask(*messages, stream=True, **body)
        assert response.status_code == 200, response.text
        assert response.text.endswith("data: [DONE]\n\n")
        return [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]

    async def get(self, path: str, key: str | None = None) -> Any:
        response = await self.http.get(
            f"{self.gateway.url}/sessions/{self.session.id}{path}",
            headers={"authorization": f"Bearer {key or self.session.control_key}"},
        )
        assert response.status_code == 200, response.text
        return response.json()

    async def timelines(self) -> list[dict[str, Any]]:
        lines: list[dict[str, Any]] = (await self.get("/timelines"))["timelines"]
        return lines

    def prompts(self) -> list[str]:
        """The prompts that the engine received, decoded."""
        return [self.engine.codec.decode(ids) for ids in self.engine.received_prompts]


def _message(index: int, message: Any) -> Any:
    if isinstance(message, str):
        return {"role": "assistant" if index % 2 else "user", "content": message}
    return message


@asynccontextmanager
async def agent(
    *scripted: Any,
    rule: ReplyRule | None = None,
    codec: Codec | None = None,
    config: GatewayConfig | None = None,
    journal: Path | None = None,
    engine: ScriptedEngine | None = None,
    gateway_engine: Any = None,
    **options: Any,
) -> AsyncIterator[Agent]:
    """A gateway with one session and a client for it; `gateway_engine` replaces the scripted engine."""
    codec = codec or (engine.codec if engine else ToyCodec())
    engine = engine or ScriptedEngine(codec, rule or replies(*scripted))
    async with (
        Gateway(engine=gateway_engine or engine, codec=codec, config=config, journal=journal) as gateway,
        httpx.AsyncClient(timeout=HANG_S) as http,
    ):
        yield Agent(gateway, await gateway.session(**options), http, engine)
