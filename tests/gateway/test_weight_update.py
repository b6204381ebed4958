"""A weight update during eight streams: no stream breaks, and the tree has the version of every token."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from branchline.chat.toy import ToyCodec
from branchline.core.token_arrays import as_ids
from branchline.gateway.server import Gateway, GatewaySession
from tests.engines.tiny_model import (
    ForwardGate,
    collect,
    greedy,
    hf,
    reference_ids,
    run,
    running_engine,
    tiny_model,
)
from tests.hang import HANG_S

OLD, NEW = 3, 4
TOKENS, FORWARDS = 60, 25
"""Tokens per stream, and the forward pass during which the policy is paused."""
QUESTIONS = [f"question {n} " * (1 + 3 * n) for n in range(8)]


def messages(*texts: str) -> list[dict[str, str]]:
    return [{"role": "assistant" if n % 2 else "user", "content": text} for n, text in enumerate(texts)]


class Client:
    """A streaming client that checks the stream it reads."""

    def __init__(self, http: httpx.AsyncClient, session: GatewaySession) -> None:
        self.http, self.session = http, session
        self.text, self.finish, self.events = "", None, 0

    async def ask(self, *texts: str) -> None:
        body = {
            "model": "toy",
            "messages": messages(*texts),
            "temperature": 0,
            "max_tokens": TOKENS,
            "stream": True,
        }
        keys = {"authorization": f"Bearer {self.session.api_key}"}
        url = f"{self.session.base_url}/chat/completions"
        self.text, self.finish, self.events, lines = "", None, 0, []
        async with self.http.stream("POST", url, json=body, headers=keys) as response:
            assert response.status_code == 200
            async for line in response.aiter_lines():
                lines.append(line)
                if line.startswith("data: {"):
                    (choice,) = json.loads(line[6:])["choices"]
                    assert self.finish is None
                    self.text += choice["delta"].get("content") or ""
                    self.finish = choice["finish_reason"]
                    self.events += 1
        assert [line for line in lines if line][-1] == "data: [DONE]"

    async def timeline(self) -> dict[str, Any]:
        response = await self.http.get(
            f"{self.session.base_url.removesuffix('/v1')}/timelines",
            headers={"authorization": f"Bearer {self.session.control_key}"},
        )
        (line,) = response.json()["timelines"]
        return dict(line)


def outputs(line: dict[str, Any]) -> list[tuple[list[int], list[int], list[int]]]:
    """For each run of sampled ids: all ids before it, the run itself, its versions."""
    runs, start, mask = [], 0, [*line["mask"], 0]
    for index, is_sampled in enumerate(mask):
        if is_sampled and (index == 0 or not mask[index - 1]):
            start = index
        elif not is_sampled and index and mask[index - 1]:
            runs.append((line["ids"][:start], line["ids"][start:index], line["versions"][start:index]))
    return runs


async def fresh(seed: int, ids: list[int], max_tokens: int) -> list[int]:
    """The ids that a new engine with these weights samples after a prompt."""
    async with running_engine(tiny_model(seed)) as engine:
        return (await collect(engine, as_ids(ids), greedy(max_tokens))).ids


def test_eight_streams_continue_under_new_weights_with_versions_per_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def body() -> None:
        model, codec = tiny_model(), ToyCodec()
        engine = hf.HfEngine(model, version=OLD)
        pause = engine.pause
        await pause()
        async with (
            Gateway(engine=engine, codec=codec) as gateway,
            httpx.AsyncClient(timeout=HANG_S) as http,
        ):

            async def policy(verb: str, **body: int) -> dict[str, Any]:
                keys = {"authorization": f"Bearer {gateway.admin_key}"}
                response = await http.post(f"{gateway.url}/policy/{verb}", json=body, headers=keys)
                assert response.status_code == 200, response.text
                return dict(response.json())

            clients = [Client(http, await gateway.session()) for _ in QUESTIONS]
            streams = [
                asyncio.create_task(client.ask(question))
                for client, question in zip(clients, QUESTIONS, strict=True)
            ]
            while engine.stats.waiting < len(clients):
                await asyncio.sleep(0)
            gate = ForwardGate(model, FORWARDS)

            async def pause_in_a_step() -> None:
                pausing = asyncio.create_task(pause())
                await asyncio.sleep(0)
                gate.is_open.set()
                await pausing

            monkeypatch.setattr(engine, "pause", pause_in_a_step)
            await policy("resume")
            await asyncio.to_thread(gate.is_reached.wait)
            assert await policy("pause") == {"paused": True, "version": OLD}
            late = Client(http, await gateway.session())
            streams.append(asyncio.create_task(late.ask("late")))
            await engine.update_weights(tiny_model(seed=1).state_dict(), NEW)
            assert await policy("resume", version=NEW) == {"paused": False, "version": NEW}
            await asyncio.gather(*streams)

            for client, question in zip(clients, QUESTIONS, strict=True):
                ((prompt_ids, ids, versions),) = outputs(await client.timeline())
                assert codec.decode(as_ids(prompt_ids)) == f"user:{question}\nassistant:"
                # The stream is complete and has more than two events.
                assert (client.finish, len(ids)) == ("length", TOKENS)
                assert client.text == codec.parse(as_ids(ids), "length").content
                assert client.events > 2
                # Versions change once, at the pause.
                before = versions.count(OLD)
                assert versions == [OLD] * before + [NEW] * (TOKENS - before)
                assert FORWARDS - 8 <= before <= FORWARDS
                # Each part is what its weights alone sample after the same ids.
                assert ids[:before] == reference_ids(tiny_model(), as_ids(prompt_ids), before)
                prefix = [*prompt_ids, *ids[:before]]
                assert ids[before:] == await fresh(1, prefix, TOKENS - before)

            # A call that arrived during the pause was sampled by the new weights.
            ((prompt_ids, ids, versions),) = outputs(await late.timeline())
            assert versions == [NEW] * TOKENS
            assert ids == await fresh(1, prompt_ids, TOKENS)

            # The next turn follows both parts, without anything computed by the old weights.
            await clients[0].ask(QUESTIONS[0], clients[0].text, "and then?")
            first, second = outputs(await clients[0].timeline())
            assert second[0][: len(first[0]) + TOKENS] == [*first[0], *first[1]]
            assert second[2] == [NEW] * TOKENS
            assert second[1] == await fresh(1, second[0], TOKENS)

    run(body())


def test_resume_with_a_version_over_http() -> None:
    """A trainer that shares the model pauses, steps its optimizer and resumes; no weights are sent."""

    async def body() -> None:
        model = tiny_model()
        engine = hf.HfEngine(model, version=OLD)
        async with (
            Gateway(engine=engine, codec=ToyCodec()) as gateway,
            httpx.AsyncClient(timeout=HANG_S) as http,
        ):
            keys = {"authorization": f"Bearer {gateway.admin_key}"}
            client = Client(http, await gateway.session())
            await client.ask("p")
            await http.post(f"{gateway.url}/policy/pause", headers=keys)
            model.load_state_dict(tiny_model(seed=1).state_dict())
            await http.post(f"{gateway.url}/policy/resume", json={"version": NEW}, headers=keys)
            await client.ask("p", client.text, "q")
            first, second = outputs(await client.timeline())
        assert (set(first[2]), set(second[2])) == ({OLD}, {NEW})
        assert first[1] == reference_ids(tiny_model(), as_ids(first[0]), TOKENS)
        assert second[1] == await fresh(1, second[0], TOKENS)

    run(body())
