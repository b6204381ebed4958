"""A gateway in front of a real vLLM server, and a record of what crosses between them."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from branchline.chat.generic.codec import GenericCodec
from branchline.chat.vision import ImageSpan
from branchline.core.token_arrays import Ids
from branchline.engines.base import Chunk, Engine, SamplingParams
from branchline.engines.vllm import VllmEngine
from branchline.gateway.server import Gateway, GatewaySession

URLS = os.environ.get("BRANCHLINE_VLLM_URLS", "").split()
"""The first server has vLLM's development endpoints, the second does not."""
MODEL = Path(os.environ.get("BRANCHLINE_VLLM_MODEL", ""))
TIMEOUT_S = 120.0
"""Timeout of every wait; the first request to a server takes longest."""


@dataclass
class RecordedGeneration:
    """The prompt and output of one call of the engine."""

    prompt: list[int]
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    chunks: int = 0

    def add(self, chunk: Chunk) -> None:
        assert chunk.logprobs is not None
        self.ids += chunk.ids.tolist()
        self.logprobs += chunk.logprobs.tolist()
        self.versions += [chunk.version] * len(chunk.ids)
        self.chunks += 1


class RecordingVllmEngine(VllmEngine):
    """A vLLM engine that records its generations."""

    def __init__(self, url: str, **options: Any) -> None:
        super().__init__(url, **options)
        self.url = url
        self.generations: list[RecordedGeneration] = []
        self._progressed = asyncio.Event()

    async def generate(
        self,
        prompt_ids: Ids,
        params: SamplingParams,
        *,
        session: str = "",
        images: Sequence[ImageSpan] = (),
    ) -> AsyncGenerator[Chunk, None]:
        generation = RecordedGeneration(prompt_ids.tolist())
        self.generations.append(generation)
        self._progressed.set()
        async with aclosing(super().generate(prompt_ids, params, session=session, images=images)) as chunks:
            async for chunk in chunks:
                generation.add(chunk)
                self._progressed.set()
                yield chunk

    async def wait_for_requests(self, count: int) -> None:
        """Waits until this many generations have begun."""
        await self._wait_until(lambda: len(self.generations) >= count)

    async def wait_for_tokens(self, count: int) -> None:
        """Waits until a generation has this many ids."""
        await self._wait_until(lambda: any(len(generation.ids) >= count for generation in self.generations))

    async def _wait_until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._progressed.clear()
            await self._progressed.wait()


@dataclass
class SessionClient:
    """A client of one session."""

    gateway: Gateway
    session: GatewaySession
    http: httpx.AsyncClient

    def body(self, *messages: str, **more: Any) -> dict[str, Any]:
        """A greedy request; the strings are user and assistant messages in turn."""
        roles = ("user", "assistant")
        turns = [{"role": roles[index % 2], "content": text} for index, text in enumerate(messages)]
        return {"model": "any", "messages": turns, "temperature": 0, "max_tokens": 24, **more}

    @property
    def url(self) -> str:
        return f"{self.session.base_url}/chat/completions"

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.session.api_key}"}

    async def post_chat(self, *messages: str, **more: Any) -> httpx.Response:
        return await self.http.post(self.url, json=self.body(*messages, **more), headers=self.headers)

    async def chat_text(self, *messages: str, **more: Any) -> str:
        response = await self.post_chat(*messages, **more)
        assert response.status_code == 200, response.text
        if not more.get("stream"):
            text: str = response.json()["choices"][0]["message"]["content"]
            return text
        events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
        deltas = [choice["delta"] for event in events for choice in event["choices"]]
        return "".join(delta.get("content") or "" for delta in deltas)

    async def get(self, path: str) -> Any:
        response = await self.http.get(
            f"{self.gateway.url}/sessions/{self.session.id}{path}",
            headers={"authorization": f"Bearer {self.session.control_key}"},
        )
        assert response.status_code == 200, response.text
        return response.json()

    async def post_admin(self, path: str, body: dict[str, Any]) -> None:
        headers = {"authorization": f"Bearer {self.gateway.admin_key}"}
        response = await self.http.post(f"{self.gateway.url}{path}", json=body, headers=headers)
        assert response.status_code == 200, response.text

    async def sampled_paths(self) -> list[list[int]]:
        """For each sampled node of the tree, the ids from the root to its end."""
        nodes = {node["id"]: node for node in (await self.get("/tree"))["nodes"]}

        def path(node: dict[str, Any]) -> list[int]:
            parent = nodes.get(node["parent"])
            return (path(parent) if parent else []) + node["ids"]

        return [path(node) for node in nodes.values() if node["call"] is not None]

    async def open_session(self) -> SessionClient:
        """Another session of the same gateway."""
        return SessionClient(self.gateway, await self.gateway.session(), self.http)


@asynccontextmanager
async def gateway_client(engine: Engine) -> AsyncIterator[SessionClient]:
    """A gateway over an engine, and a client of one session."""
    codec = GenericCodec.open(MODEL)
    async with (
        Gateway(engine=engine, codec=codec) as gateway,
        httpx.AsyncClient(timeout=TIMEOUT_S) as http,
    ):
        yield SessionClient(gateway, await gateway.session(), http)


async def connect(url: str, **options: Any) -> RecordingVllmEngine:
    engine = RecordingVllmEngine(url, **options)
    await engine.ready()
    return engine


class VllmMetrics:
    """The metrics of a server."""

    def __init__(self, url: str, http: httpx.AsyncClient) -> None:
        self._url = url
        self._http = http

    async def read(self, name: str) -> int:
        text = (await self._http.get(f"{self._url}/metrics")).text
        match = re.search(rf"^vllm:{name}\{{.*\}} (\S+)$", text, re.MULTILINE)
        assert match is not None, text[:500]
        return int(float(match[1]))

    async def running_requests(self) -> int:
        """The number of requests that are being computed."""
        return await self.read("num_requests_running")

    async def generated_tokens(self) -> int:
        """The number of tokens sampled since the server started."""
        return await self.read("generation_tokens_total")

    async def wait_until_idle(self) -> None:
        """Polls the server until no request runs: it does not report this by itself."""
        async with asyncio.timeout(TIMEOUT_S):
            while await self.running_requests():
                pass
