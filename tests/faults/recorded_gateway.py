"""A gateway process with a journal, clients that note what was acknowledged to them, and checks of the trees.

The process is that of `tests/gateway/kill_server.py`: its replies depend only on the prompt, so that every
answer in a tree can be checked against the ids before it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import httpx
import msgspec

from branchline.core.token_arrays import as_ids
from tests.gateway.kill_server import KILL_VARIABLE, READY, SETTINGS_VARIABLE, ServerSettings, is_reply

ROOT = Path(__file__).parents[2]
ADMIN = {"authorization": "Bearer ak-fault-test"}
TIMEOUT_S = 30.0


@dataclass
class RecordedSession:
    """A session and the answers that its client received: prompt ids and output ids by call."""

    id: str
    headers: dict[str, str]
    messages: list[dict[str, str]] = field(default_factory=list)
    answers: dict[str, tuple[list[int], list[int]]] = field(default_factory=dict)


class RecordedGateway:
    """Starts, uses, kills and checks one gateway after another on the same journal."""

    def __init__(self, folder: Path, settings: ServerSettings | None = None) -> None:
        self.folder = folder
        self._settings = settings or ServerSettings()
        self.journal = folder / "journal"
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self._port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}"
        self.http = httpx.AsyncClient(timeout=TIMEOUT_S, limits=httpx.Limits(max_connections=None))
        self.process: asyncio.subprocess.Process | None = None
        self.sessions: list[RecordedSession] = []
        self.refused = 0
        """Calls that were answered with 503."""
        self.broken = 0
        """Requests without an answer, because the connection broke."""

    async def __aenter__(self) -> RecordedGateway:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.kill()
        await self.http.aclose()

    async def start(self) -> None:
        self.process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.gateway.kill_server", str(self.folder), str(self._port)),
            ADMIN["authorization"].removeprefix("Bearer "),
            cwd=ROOT,
            env={
                **os.environ,
                KILL_VARIABLE: "",
                SETTINGS_VARIABLE: msgspec.json.encode(self._settings).decode(),
            },
            stdout=asyncio.subprocess.PIPE,
        )
        assert self.process.stdout is not None
        async with asyncio.timeout(TIMEOUT_S):
            assert await self.process.stdout.readline() == READY

    async def kill(self) -> None:
        if self.process is not None and self.process.returncode is None:
            self.process.send_signal(signal.SIGKILL)
            await self.process.wait()

    async def open_session(self) -> RecordedSession | None:
        """A new session; None if the gateway refused it or was killed."""
        opened = await self._send("POST", "/sessions", {}, ADMIN)
        if opened is None or opened.status_code == 503:
            return None
        assert opened.status_code == 201, opened.text
        keys = opened.json()
        session = RecordedSession(keys["id"], {"authorization": f"Bearer {keys['api_key']}"})
        self.sessions.append(session)
        return session

    async def ask(self, session: RecordedSession, text: str) -> bool:
        """One turn of a session; returns whether it was acknowledged."""
        messages = [*session.messages, {"role": "user", "content": text}]
        body = {"messages": messages, "return_token_ids": True}
        path = f"/sessions/{session.id}/v1/chat/completions"
        response = await self._send("POST", path, body, session.headers)
        if response is None or response.status_code == 503:
            self.refused += response is not None
            return False
        assert response.status_code == 200, response.text
        answer = response.json()
        choice = answer["choices"][0]
        session.answers[answer["id"]] = (answer["prompt_token_ids"], choice["token_ids"])
        session.messages = [*messages, {"role": "assistant", "content": choice["message"]["content"]}]
        if len(session.messages) > 12:
            session.messages = []
        return True

    async def run_load(self, stop: asyncio.Event, rng: Random) -> None:
        """Plays turns of new sessions until `stop` is set."""
        session: RecordedSession | None = None
        while not stop.is_set():
            if session is None or rng.random() < 0.05:
                session = await self.open_session()
            is_answered = session is not None and await self.ask(session, f"{rng.random()}")
            if not is_answered:
                await asyncio.sleep(0.02)

    async def get(self, path: str) -> Any:
        response = await self._send("GET", path, None, ADMIN)
        assert response is not None
        assert response.status_code == 200, response.text
        return response.json()

    async def _send(
        self, method: str, path: str, body: Any, headers: dict[str, str]
    ) -> httpx.Response | None:
        """The response; None if the connection broke."""
        try:
            return await self.http.request(method, self.url + path, json=body, headers=headers)
        except httpx.TransportError:
            self.broken += 1
            return None

    async def check(self, without: frozenset[str] = frozenset()) -> tuple[int, int]:
        """Returns how many acknowledged answers are not in the trees, and how many answers in the trees do
        not follow from the ids before them. Sessions in `without` are left out."""
        lost = inexact = 0
        for session in self.sessions:
            if session.id not in without:
                nodes = (await self.get(f"/sessions/{session.id}/tree"))["nodes"]
                counts = check_tree(nodes, session.answers)
                lost, inexact = lost + counts[0], inexact + counts[1]
        return lost, inexact


def check_tree(
    nodes: list[dict[str, Any]], answers: dict[str, tuple[list[int], list[int]]]
) -> tuple[int, int]:
    """Returns how many answers are not in a tree as received, and how many outputs are inexact."""
    by_id = {node["id"]: node for node in nodes}
    path_ids: dict[int, list[int]] = {}
    found: dict[str, tuple[list[int], list[int]]] = {}
    inexact = 0
    for node in nodes:  # parents precede their children
        ids = path_ids.get(node["parent"], []) + node["ids"] if node["parent"] in by_id else node["ids"]
        path_ids[node["id"]] = ids
        if node["call"] is not None:
            count = node["spans"][-1][0]
            found[node["call"]] = (ids[:-count], ids[-count:])
            inexact += not is_reply(as_ids(ids[:-count]), as_ids(ids[-count:]))
    return sum(found.get(call) != answer for call, answer in answers.items()), inexact
