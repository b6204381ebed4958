"""After kill -9 at any moment and a restart, retries continue token-exact and nothing acknowledged is lost.

A gateway process is killed again and again under load: by itself at a chosen kill point, or from outside at
any moment. It is restarted on the same journal and port. An answer is acknowledged once its client has all of
it, or the last finish reason of its stream. After each restart, before any client continues, and at the end,
every acknowledged answer must be in the tree: with the ids that the client received, after the prompt that it
received. Every answer in a tree must be the engine's reply to exactly its prompt.

    pytest -m slow -s tests/gateway/test_kill.py        # 50 kills, and the table
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import httpx
import numpy as np
import pytest

from branchline.core.token_arrays import as_ids
from branchline.engines.scripted import scripted_logprobs
from tests.gateway.kill_server import (
    AFTER_JOURNAL,
    BEFORE_JOURNAL,
    CODEC,
    KILL_VARIABLE,
    READY,
    KillPoint,
    Phase,
    is_reply,
    read_killed_calls,
    read_phase_counts,
)

ROOT = Path(__file__).parents[2]
ADMIN = "ak-kill-test"
OUTSIDE = "outside"
EPISODES, AGENTS = 4, 3
"""Concurrent sessions, and concurrent agents in each."""
LONGEST_COUNTDOWN = {KillPoint.STREAMING: 250, KillPoint.REPLAY: 200}
OTHER_COUNTDOWN = 40
MAX_LIFETIME_S = 0.6
TIMEOUT_S = 30.0
"""The test fails if a process neither serves nor exits for this long."""

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="no SIGKILL")


@dataclass(frozen=True)
class AcknowledgedAnswer:
    """An acknowledged answer, as its client received it."""

    call: str
    agent: str
    prompt_ids: list[int]
    outputs: list[list[int]]
    texts: list[str]

    @property
    def tokens(self) -> int:
        return sum(map(len, self.outputs))


@dataclass
class Episode:
    """A session, as its clients know it."""

    id: str
    api_key: str
    control_key: str
    answers: list[AcknowledgedAnswer] = field(default_factory=list)
    conversations: dict[str, list[tuple[AcknowledgedAnswer, int]]] = field(default_factory=dict)
    """For each agent its turns: an answer and the index of the choice that was continued."""
    rewards: list[float] = field(default_factory=list)
    finalized: bool = False


@dataclass
class ServerProcess:
    """One gateway process."""

    process: asyncio.subprocess.Process
    exited: asyncio.Event = field(default_factory=asyncio.Event)
    retries: int = 0
    """How many requests failed with it."""


@dataclass(frozen=True)
class Kill:
    """A kill, and the calls in flight by phase."""

    point: str
    process: ServerProcess
    in_flight: list[int]
    at_point: list[str]
    """The calls at the kill point."""


class KillHarness:
    """A gateway that is killed, the agents that use it, and the answers that they received."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._folder = folder
        self._rng = Random(seed)
        self._port = _free_port()
        self._url = f"http://127.0.0.1:{self._port}"
        self._http = httpx.AsyncClient(timeout=TIMEOUT_S, limits=httpx.Limits(max_connections=None))
        self._serving = asyncio.Event()
        self._process: ServerProcess | None = None
        self._is_ending = False
        self._names = count()
        self.episodes: list[Episode] = []
        self._unchecked: list[Episode] = []
        self.killed: list[Kill] = []
        self._found: set[str] = set()
        self._unconfirmed: Kill | None = None
        self.equal_siblings = 0
        self.lost: list[str] = []
        self.violations: list[str] = []

    async def run(self, points: Sequence[str]) -> None:
        """Kills one process after another, lets all agents finish, then checks everything."""
        load = asyncio.gather(*(self._run_episodes(Random(self._rng.random())) for _ in range(EPISODES)))
        try:
            for point in points:
                await self._run_until_kill(point, load)
            self._is_ending = True
            await self._start()
            self._serving.set()
            await load
            self._unchecked = list(self.episodes)
            await self._check_all(final=True)
        finally:
            load.cancel()
            await asyncio.gather(load, return_exceptions=True)
            await self._http.aclose()
            await self._end()

    # -- the process ---------------------------------------------------------------------------------

    async def _run_until_kill(self, point: str, load: asyncio.Future[Any]) -> None:
        spec = ""
        if point != OUTSIDE:
            countdown = LONGEST_COUNTDOWN.get(KillPoint(point), OTHER_COUNTDOWN)
            spec = f"{point}:{self._rng.randint(1, countdown)}"
        process, serves = await self._start(spec)
        if serves:
            self._serving.set()
            dead = asyncio.ensure_future(process.process.wait())
            timeout_s = self._rng.uniform(0, MAX_LIFETIME_S) if point == OUTSIDE else TIMEOUT_S
            await asyncio.wait({dead, load}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if load.done():
                load.result()  # raises the error of an agent
            if point == OUTSIDE:
                process.process.send_signal(signal.SIGKILL)
            async with asyncio.timeout(TIMEOUT_S):
                assert await dead == -signal.SIGKILL, f"{point}: ended with {dead.result()}"
        await self._end()
        killed = Kill(point, process, read_phase_counts(self._folder), read_killed_calls(self._folder))
        self.killed.append(killed)
        if killed.at_point:
            self._unconfirmed = killed

    async def _start(self, spec: str = "") -> tuple[ServerProcess, bool]:
        """Starts a process; returns whether it serves. If so, its trees are checked."""
        subprocess = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "tests.gateway.kill_server", str(self._folder), str(self._port), ADMIN),
            cwd=ROOT,
            env={**os.environ, KILL_VARIABLE: spec},
            stdout=asyncio.subprocess.PIPE,
        )
        process = self._process = ServerProcess(subprocess)
        assert subprocess.stdout is not None
        async with asyncio.timeout(TIMEOUT_S):
            line = await subprocess.stdout.readline()
        if line != READY:
            assert await subprocess.wait() == -signal.SIGKILL, f"did not start: {subprocess.returncode}"
            assert spec.startswith(KillPoint.REPLAY), f"exited early: {spec}"
            return process, False
        await self._check_all()
        self._confirm_last_kill()
        return process, True

    def _confirm_last_kill(self) -> None:
        """Checks that the calls at the last kill point are, or are not, in the journal."""
        killed, self._unconfirmed = self._unconfirmed, None
        if killed is None:
            return
        found = [call in self._found for call in killed.at_point]
        if killed.point in AFTER_JOURNAL:
            assert all(found), f"killed {killed.point}, and not in the journal: {killed.at_point}"
        elif killed.point in BEFORE_JOURNAL:
            assert not any(found), f"killed {killed.point}, and in the journal: {killed.at_point}"

    async def _end(self) -> None:
        self._serving.clear()
        if self._process is not None:
            if self._process.process.returncode is None:
                self._process.process.kill()
            await self._process.process.wait()
            self._process.exited.set()

    # -- the load ------------------------------------------------------------------------------------

    async def _run_episodes(self, rng: Random) -> None:
        while not self._is_ending:
            episode = await self._open()
            async with asyncio.TaskGroup() as agents:
                for number in range(AGENTS):
                    agents.create_task(
                        self._run_conversation(episode, f"agent-{number}", Random(rng.random()))
                    )
            score = rng.random()
            await self._control(episode, "reward", {"score": score})
            episode.rewards.append(score)
            await self._control(episode, "finalize", {})
            episode.finalized = True

    async def _run_conversation(self, episode: Episode, agent: str, rng: Random) -> None:
        turns = episode.conversations.setdefault(agent, [])
        messages = [{"role": "system", "content": f"You are {agent}."}]
        for turn in range(rng.randint(3, 6)):
            messages.append({"role": "user", "content": f"{turn}: {rng.random()}"})
            body = {"messages": messages, "return_token_ids": True, "n": rng.choice((1, 1, 1, 2))}
            answer = await self._ask(episode, agent, {**body, "stream": rng.random() < 0.6}, rng)
            choice = rng.randrange(len(answer.outputs))
            turns.append((answer, choice))
            messages.append({"role": "assistant", "content": answer.texts[choice]})

    async def _ask(
        self, episode: Episode, agent: str, body: dict[str, Any], rng: Random
    ) -> AcknowledgedAnswer:
        """Asks until an answer is acknowledged."""
        by_key_alone = rng.random() < 0.5
        path = "/v1/chat/completions" if by_key_alone else f"/sessions/{episode.id}/v1/chat/completions"
        headers = {"authorization": f"Bearer {episode.api_key}", "x-branchline-agent": agent}
        for attempt in count():
            process = await self._alive()
            retry = {"x-stainless-retry-count": str(attempt)} if attempt else {}
            call = self._request_streamed if body["stream"] else self._request
            answer = await call(episode, agent, path, body, {**headers, **retry})
            if answer is not None:
                return answer
            await self._wait_for_end(process)
        raise AssertionError

    async def _request(
        self, episode: Episode, agent: str, path: str, body: dict[str, Any], headers: dict[str, str]
    ) -> AcknowledgedAnswer | None:
        response = await self._post(path, body, headers)
        if response is None:
            return None
        choices = sorted(response["choices"], key=lambda choice: choice["index"])
        texts = [choice["message"]["content"] for choice in choices]
        outputs = [choice["token_ids"] for choice in choices]
        return self._acknowledged(
            episode, AcknowledgedAnswer(response["id"], agent, response["prompt_token_ids"], outputs, texts)
        )

    async def _request_streamed(
        self, episode: Episode, agent: str, path: str, body: dict[str, Any], headers: dict[str, str]
    ) -> AcknowledgedAnswer | None:
        outputs: list[list[int]] = [[] for _ in range(body["n"])]
        texts = [""] * body["n"]
        prompt_ids: list[int] = []
        left = set(range(body["n"]))
        answer: AcknowledgedAnswer | None = None
        try:
            async with self._http.stream("POST", self._url + path, json=body, headers=headers) as response:
                assert response.status_code == 200, (await response.aread()).decode()
                async for line in response.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    event = json.loads(line[6:])
                    assert "error" not in event, event
                    prompt_ids = event.get("prompt_token_ids", prompt_ids)
                    for choice in event["choices"]:
                        index = choice["index"]
                        outputs[index] += choice.get("token_ids", [])
                        texts[index] += choice["delta"].get("content") or ""
                        if choice["finish_reason"] is not None:
                            left.discard(index)
                    if not left and answer is None:
                        # Acknowledged, however the connection ends.
                        answer = AcknowledgedAnswer(event["id"], agent, prompt_ids, outputs, texts)
                        self._acknowledged(episode, answer)
        except httpx.TransportError:
            return answer
        assert answer is not None, f"a stream of {episode.id} ended without a finish reason"
        return answer

    def _acknowledged(self, episode: Episode, answer: AcknowledgedAnswer) -> AcknowledgedAnswer:
        for ids, text in zip(answer.outputs, answer.texts, strict=True):
            assert CODEC.parse(as_ids(ids)).content == text, "the text differs from the ids"
        episode.answers.append(answer)
        return answer

    async def _open(self) -> Episode:
        while True:
            process = await self._alive()
            # If the response was lost, the id is taken and its keys are unknown: use another id.
            name = f"s{next(self._names)}"
            opened = await self._post("/sessions", {"id": name}, {"authorization": f"Bearer {ADMIN}"})
            if opened is not None:
                episode = Episode(name, opened["api_key"], opened["control_key"])
                self.episodes.append(episode)
                self._unchecked.append(episode)
                return episode
            await self._wait_for_end(process)

    async def _control(self, episode: Episode, verb: str, body: dict[str, Any]) -> None:
        headers = {"authorization": f"Bearer {episode.control_key}"}
        while True:
            process = await self._alive()
            if await self._post(f"/sessions/{episode.id}/{verb}", body, headers) is not None:
                return
            await self._wait_for_end(process)

    async def _post(self, path: str, body: dict[str, Any], headers: dict[str, str]) -> Any:
        """The response; None if the connection broke."""
        try:
            response = await self._http.post(self._url + path, json=body, headers=headers)
        except httpx.TransportError:
            return None
        assert response.status_code in (200, 201), f"{path}: {response.status_code} {response.text}"
        return response.json()

    async def _alive(self) -> ServerProcess:
        await self._serving.wait()
        assert self._process is not None
        return self._process

    async def _wait_for_end(self, process: ServerProcess) -> None:
        """Waits until the process exits; fails if a connection broke without that."""
        process.retries += 1
        async with asyncio.timeout(TIMEOUT_S):
            await process.exited.wait()

    # -- the checks ----------------------------------------------------------------------------------

    async def _check_all(self, *, final: bool = False) -> None:
        """Checks the sessions used since the last restart, at the end all sessions."""
        self._found.clear()
        await asyncio.gather(*(self._check(episode, final=final) for episode in self._unchecked))
        self._unchecked = [episode for episode in self._unchecked if not episode.finalized]

    async def _check(self, episode: Episode, *, final: bool) -> None:
        for path in ("/v1/models", f"/sessions/{episode.id}/v1/models"):
            await self._get(path, episode.api_key)
        session = await self._get(f"/sessions/{episode.id}", episode.control_key)
        scores = [reward["score"] for reward in session["rewards"]]
        if not set(episode.rewards) <= set(scores):
            self.lost.append(f"{episode.id}: rewards {episode.rewards}, found {scores}")
        if episode.finalized and session["state"] != "finalized":
            self.lost.append(f"{episode.id}: was finalized, is {session['state']}")
        tree = await self._get(f"/sessions/{episode.id}/tree", episode.control_key)
        nodes = _Nodes(tree["nodes"])
        self._check_tree(episode, nodes)
        for agent, turns in episode.conversations.items():
            equal_siblings = self._check_conversation(episode, agent, turns, nodes)
            self.equal_siblings += equal_siblings if final else 0
        if final:
            await self._check_exports(episode)

    def _check_tree(self, episode: Episode, nodes: _Nodes) -> None:
        self._found |= nodes.by_call.keys()
        for node in nodes.sampled:
            prompt_ids, ids = nodes.split(node)
            if not is_reply(as_ids(prompt_ids), as_ids(ids)):
                self.violations.append(f"{episode.id}: node {node['id']} does not follow from its prompt")
        for answer in episode.answers:
            outputs = nodes.by_call.get(answer.call, [])
            if len(outputs) != len(answer.outputs):
                self.lost.append(f"{episode.id}: {answer.call}, {answer.tokens} tokens")
                continue
            for node, ids in zip(outputs, answer.outputs, strict=True):
                if nodes.split(node) != (answer.prompt_ids, ids):
                    self.violations.append(
                        f"{episode.id}: {answer.call} differs from what the client received"
                    )

    def _check_conversation(
        self, episode: Episode, agent: str, turns: list[tuple[AcknowledgedAnswer, int]], nodes: _Nodes
    ) -> int:
        """Checks that the path of the last answer is the conversation, with every turn as received.

        Returns how many turns are an equal sibling, sampled for an attempt that never reached its client.
        """
        if not turns or len(nodes.by_call.get(turns[-1][0].call, [])) <= turns[-1][1]:
            return 0  # no turn yet, or lost and counted as such
        last, choice = turns[-1]
        path = [node for node in nodes.path(nodes.by_call[last.call][choice]) if node["call"] is not None]
        if len(path) != len(turns):
            self.violations.append(f"{episode.id}: {agent} had {len(turns)} turns, its path {len(path)}")
            return 0
        for node, (answer, choice) in zip(path, turns, strict=True):
            if nodes.split(node) != (answer.prompt_ids, answer.outputs[choice]):
                self.violations.append(f"{episode.id}: {answer.call} is not on the path of {agent}")
        return sum(node["call"] != answer.call for node, (answer, _) in zip(path, turns, strict=True))

    async def _check_exports(self, episode: Episode) -> None:
        shown = await self._get(f"/sessions/{episode.id}/timelines", episode.control_key)
        for line in shown["timelines"]:
            ids, logprobs = as_ids(line["ids"]), np.array(line["logprobs"], np.float32)
            edges = np.flatnonzero(np.diff([0, *line["mask"], 0])).reshape(-1, 2)
            for start, end in edges.tolist():
                expected = scripted_logprobs(ids[:start], ids[start:end], 0, end - start)
                if not np.array_equal(expected, logprobs[start:end]):
                    self.violations.append(f"{episode.id}: logprobs of {line['calls']} at {start}")
        report = await self._get(f"/sessions/{episode.id}/report", episode.control_key)
        dropped = {entry["call"] for entry in report["dropped"]}
        self.lost += [
            f"{episode.id}: {answer.call} is not trained"
            for answer in episode.answers
            if answer.call in dropped
        ]

    async def _get(self, path: str, key: str) -> Any:
        response = await self._http.get(self._url + path, headers={"authorization": f"Bearer {key}"})
        assert response.status_code == 200, f"{path}: {response.status_code} {response.text}"
        return response.json()

    # -- the report ----------------------------------------------------------------------------------

    def table(self) -> str:
        phases = [phase.name.lower() for phase in Phase]
        lines = [f"{'killed':14}{'kills':>7}" + "".join(f"{name:>12}" for name in phases) + f"{'retries':>9}"]
        for point in (*KillPoint, OUTSIDE, "all"):
            rows = [kill for kill in self.killed if point in (kill.point, "all")]
            cut = [sum(kill.in_flight[phase] for kill in rows) for phase in Phase]
            lines.append(
                f"{point:14}{len(rows):7}"
                + "".join(f"{number:12}" for number in cut)
                + f"{sum(kill.process.retries for kill in rows):9}"
            )
        answers = [answer for episode in self.episodes for answer in episode.answers]
        lines.append(
            f"{len(self.episodes)} sessions, {len(answers)} acknowledged replies with "
            f"{sum(one.tokens for one in answers)} tokens: lost {len(self.lost)}, "
            f"violations {len(self.violations)}; {self.equal_siblings} turns are an equal sibling"
        )
        return "\n".join(lines)


class _Nodes:
    """A tree as the gateway shows it."""

    def __init__(self, nodes: list[dict[str, Any]]) -> None:
        self._by_id = {node["id"]: node for node in nodes}
        self.sampled = [node for node in nodes if node["call"] is not None]
        self.by_call: dict[str, list[dict[str, Any]]] = {}
        for node in self.sampled:
            self.by_call.setdefault(node["call"], []).append(node)

    def path(self, node: dict[str, Any]) -> list[dict[str, Any]]:
        path = [node]
        while path[-1]["parent"] in self._by_id:
            path.append(self._by_id[path[-1]["parent"]])
        return path[::-1]

    def split(self, node: dict[str, Any]) -> tuple[list[int], list[int]]:
        """The ids before a sampled output on its path, and those of the output."""
        ids = [token for one in self.path(node) for token in one["ids"]]
        count, origin = node["spans"][-1]
        assert origin == "sampled"
        return ids[:-count], ids[-count:]


def _free_port() -> int:
    """A port below the ephemeral range, so that it stays free between two processes."""
    for port in Random().sample(range(20_000, 32_000), 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("no free port")


def _run_kills(folder: Path, points: Sequence[str], seed: int, limit_s: float) -> KillHarness:
    async def run() -> KillHarness:
        harness = KillHarness(folder, seed)
        async with asyncio.timeout(limit_s):
            await harness.run(points)
        return harness

    started = time.monotonic()
    harness = asyncio.run(run())
    print(f"\nseed {seed}, {time.monotonic() - started:.1f} s\n{harness.table()}")
    assert Counter(kill.point for kill in harness.killed) == Counter(points)
    assert any(episode.answers for episode in harness.episodes)
    assert not harness.lost, harness.lost[:10]
    assert not harness.violations, harness.violations[:10]
    return harness


def test_three_kills_lose_nothing_acknowledged(tmp_path: Path) -> None:
    _run_kills(tmp_path, [KillPoint.QUEUED, KillPoint.JOURNALED, KillPoint.FINISHED], seed=1, limit_s=60)


@pytest.mark.slow
def test_fifty_kills_under_load_lose_nothing_acknowledged(tmp_path: Path) -> None:
    seed = int(os.environ.get("BRANCHLINE_KILL_SEED", "0")) or Random().randrange(1, 2**31)
    rng = Random(seed)
    # Every kill point four times, in any order after the first kill; the rest from outside.
    points: list[str] = [point for point in KillPoint for _ in range(4)]
    points += [OUTSIDE] * (49 - len(points))
    rng.shuffle(points)
    points = [KillPoint.JOURNALED, *points]  # a first process has nothing to replay
    harness = _run_kills(tmp_path, points, seed, limit_s=240)
    cut = np.sum([kill.in_flight for kill in harness.killed], axis=0)
    assert (cut > 0).all(), "no kill cut a call in some phase"
