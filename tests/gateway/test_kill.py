"""kill -9 at any moment, restart, and the agents' retries go on token-exact; nothing acknowledged is lost.

A gateway process dies again and again under load: by its own hand at a chosen place of a call's life, or
from outside at any moment. It comes back on the same journal and port. An answer is acknowledged once its
client has all of it, or the last finish of its stream. After each restart, before anybody goes on, and at
the end, every acknowledged answer must be in the tree: the ids the client was told, behind the prompt it
was told. Every answer that is in a tree at all must be what the engine says behind exactly its prompt.

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
ADMIN = "ak-of-the-kill-test"
OUTSIDE = "outside"
EPISODES, AGENTS = 4, 3
"""Sessions at once, and agents at once in each."""
LONGEST_COUNTDOWN = {KillPoint.STREAMING: 250, KillPoint.REPLAY: 200}
OTHER_COUNTDOWN = 40
MAX_PROCESS_LIFE_S = 0.6
TIMEOUT_S = 30.0
"""A process that neither serves nor dies for this long is a failure."""

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="no SIGKILL")


@dataclass(frozen=True)
class AcknowledgedAnswer:
    """An acknowledged answer: everything its client knows of it."""

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
    """A session as its clients know it."""

    id: str
    api_key: str
    control_key: str
    answers: list[AcknowledgedAnswer] = field(default_factory=list)
    conversations: dict[str, list[tuple[AcknowledgedAnswer, int]]] = field(default_factory=dict)
    """What each agent goes on from, turn by turn: an answer, and which of its choices."""
    rewards: list[float] = field(default_factory=list)
    finalized: bool = False


@dataclass
class ServerProcess:
    """One process, from its start to its kill."""

    process: asyncio.subprocess.Process
    exited: asyncio.Event = field(default_factory=asyncio.Event)
    retries: int = 0
    """How many requests broke with it."""


@dataclass(frozen=True)
class Kill:
    """A kill that happened, and how far the calls in flight were."""

    place: str
    process: ServerProcess
    in_flight: list[int]
    at_place: list[str]
    """The calls that were at the place."""


class KillHarness:
    """A gateway that is killed, the agents that use it, and what they have been told."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._folder = folder
        self._rng = Random(seed)
        self._port = _free_port()
        self._url = f"http://127.0.0.1:{self._port}"
        self._http = httpx.AsyncClient(timeout=TIMEOUT_S, limits=httpx.Limits(max_connections=None))
        self._serving = asyncio.Event()
        self._life: ServerProcess | None = None
        self._is_ending = False
        self._names = count()
        self.episodes: list[Episode] = []
        self._unchecked: list[Episode] = []
        self.killed: list[Kill] = []
        self._found: set[str] = set()
        self._unconfirmed: Kill | None = None
        self.twins = 0
        self.lost: list[str] = []
        self.violations: list[str] = []

    async def run(self, places: Sequence[str]) -> None:
        """One kill after another, then everybody ends in peace and everything is checked."""
        load = asyncio.gather(*(self._run_episodes(Random(self._rng.random())) for _ in range(EPISODES)))
        try:
            for place in places:
                await self._run_until_kill(place, load)
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

    async def _run_until_kill(self, place: str, load: asyncio.Future[Any]) -> None:
        spec = ""
        if place != OUTSIDE:
            countdown = LONGEST_COUNTDOWN.get(KillPoint(place), OTHER_COUNTDOWN)
            spec = f"{place}:{self._rng.randint(1, countdown)}"
        life, serves = await self._start(spec)
        if serves:
            self._serving.set()
            dead = asyncio.ensure_future(life.process.wait())
            patience_s = self._rng.uniform(0, MAX_PROCESS_LIFE_S) if place == OUTSIDE else TIMEOUT_S
            await asyncio.wait({dead, load}, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
            if load.done():
                load.result()  # an agent met something that no retry mends
            if place == OUTSIDE:
                life.process.send_signal(signal.SIGKILL)
            async with asyncio.timeout(TIMEOUT_S):
                assert await dead == -signal.SIGKILL, f"{place}: ended with {dead.result()}"
        await self._end()
        killed = Kill(place, life, read_phase_counts(self._folder), read_killed_calls(self._folder))
        self.killed.append(killed)
        if killed.at_place:
            self._unconfirmed = killed

    async def _start(self, spec: str = "") -> tuple[ServerProcess, bool]:
        """A process, and whether it lives to answer; if so, it is checked against what clients know."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "tests.gateway.kill_server", str(self._folder), str(self._port), ADMIN),
            cwd=ROOT,
            env={**os.environ, KILL_VARIABLE: spec},
            stdout=asyncio.subprocess.PIPE,
        )
        life = self._life = ServerProcess(process)
        assert process.stdout is not None
        async with asyncio.timeout(TIMEOUT_S):
            said = await process.stdout.readline()
        if said != READY:
            assert await process.wait() == -signal.SIGKILL, f"did not start: {process.returncode}"
            assert spec.startswith(KillPoint.REPLAY), f"died before its time: {spec}"
            return life, False
        await self._check_all()
        self._confirm_last_kill()
        return life, True

    def _confirm_last_kill(self) -> None:
        """A kill landed where it was meant to, or the journal is not what it says."""
        killed, self._unconfirmed = self._unconfirmed, None
        if killed is None:
            return
        found = [call in self._found for call in killed.at_place]
        if killed.place in AFTER_JOURNAL:
            assert all(found), f"killed {killed.place}, and not in the journal: {killed.at_place}"
        elif killed.place in BEFORE_JOURNAL:
            assert not any(found), f"killed {killed.place}, and in the journal: {killed.at_place}"

    async def _end(self) -> None:
        self._serving.clear()
        if self._life is not None:
            if self._life.process.returncode is None:
                self._life.process.kill()
            await self._life.process.wait()
            self._life.exited.set()

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
        talk = episode.conversations.setdefault(agent, [])
        messages = [{"role": "system", "content": f"You are {agent}."}]
        for turn in range(rng.randint(3, 6)):
            messages.append({"role": "user", "content": f"{turn}: {rng.random()}"})
            body = {"messages": messages, "return_token_ids": True, "n": rng.choice((1, 1, 1, 2))}
            told = await self._ask(episode, agent, {**body, "stream": rng.random() < 0.6}, rng)
            choice = rng.randrange(len(told.outputs))
            talk.append((told, choice))
            messages.append({"role": "assistant", "content": told.texts[choice]})

    async def _ask(
        self, episode: Episode, agent: str, body: dict[str, Any], rng: Random
    ) -> AcknowledgedAnswer:
        """An acknowledged answer, however often it takes."""
        by_key_alone = rng.random() < 0.5
        path = "/v1/chat/completions" if by_key_alone else f"/sessions/{episode.id}/v1/chat/completions"
        headers = {"authorization": f"Bearer {episode.api_key}", "x-branchline-agent": agent}
        for attempt in count():
            life = await self._alive()
            retry = {"x-stainless-retry-count": str(attempt)} if attempt else {}
            call = self._request_streamed if body["stream"] else self._request
            told = await call(episode, agent, path, body, {**headers, **retry})
            if told is not None:
                return told
            await self._wait_for_end(life)
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
        told: AcknowledgedAnswer | None = None
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
                    if not left and told is None:
                        # Acknowledged: from here on it does not matter how the connection ends.
                        told = AcknowledgedAnswer(event["id"], agent, prompt_ids, outputs, texts)
                        self._acknowledged(episode, told)
        except httpx.TransportError:
            return told
        assert told is not None, f"a stream of {episode.id} ended in peace and without a finish"
        return told

    def _acknowledged(self, episode: Episode, told: AcknowledgedAnswer) -> AcknowledgedAnswer:
        for ids, text in zip(told.outputs, told.texts, strict=True):
            assert CODEC.parse(as_ids(ids)).content == text, "the text told is not that of the ids told"
        episode.answers.append(told)
        return told

    async def _open(self) -> Episode:
        while True:
            life = await self._alive()
            # A session whose keys were lost on the way cannot be opened again: another try, another name.
            name = f"s{next(self._names)}"
            opened = await self._post("/sessions", {"id": name}, {"authorization": f"Bearer {ADMIN}"})
            if opened is not None:
                episode = Episode(name, opened["api_key"], opened["control_key"])
                self.episodes.append(episode)
                self._unchecked.append(episode)
                return episode
            await self._wait_for_end(life)

    async def _control(self, episode: Episode, verb: str, body: dict[str, Any]) -> None:
        headers = {"authorization": f"Bearer {episode.control_key}"}
        while True:
            life = await self._alive()
            if await self._post(f"/sessions/{episode.id}/{verb}", body, headers) is not None:
                return
            await self._wait_for_end(life)

    async def _post(self, path: str, body: dict[str, Any], headers: dict[str, str]) -> Any:
        """What was answered; None where the connection broke."""
        try:
            response = await self._http.post(self._url + path, json=body, headers=headers)
        except httpx.TransportError:
            return None
        assert response.status_code in (200, 201), f"{path}: {response.status_code} {response.text}"
        return response.json()

    async def _alive(self) -> ServerProcess:
        await self._serving.wait()
        assert self._life is not None
        return self._life

    async def _wait_for_end(self, life: ServerProcess) -> None:
        """A connection that breaks means a process that died; any other is a failure."""
        life.retries += 1
        async with asyncio.timeout(TIMEOUT_S):
            await life.exited.wait()

    # -- the checks ----------------------------------------------------------------------------------

    async def _check_all(self, *, final: bool = False) -> None:
        """All sessions used since the last restart; at the end all there ever were."""
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
        for agent, talk in episode.conversations.items():
            twins = self._check_conversation(episode, agent, talk, nodes)
            self.twins += twins if final else 0
        if final:
            await self._check_exports(episode)

    def _check_tree(self, episode: Episode, nodes: _Nodes) -> None:
        self._found |= nodes.by_call.keys()
        for node in nodes.sampled:
            prompt_ids, ids = nodes.split(node)
            if not is_reply(as_ids(prompt_ids), as_ids(ids)):
                self.violations.append(f"{episode.id}: node {node['id']} does not follow from its prompt")
        for told in episode.answers:
            outputs = nodes.by_call.get(told.call, [])
            if len(outputs) != len(told.outputs):
                self.lost.append(f"{episode.id}: {told.call}, {told.tokens} tokens")
                continue
            for node, ids in zip(outputs, told.outputs, strict=True):
                if nodes.split(node) != (told.prompt_ids, ids):
                    self.violations.append(f"{episode.id}: {told.call} is not what was told")

    def _check_conversation(
        self, episode: Episode, agent: str, talk: list[tuple[AcknowledgedAnswer, int]], nodes: _Nodes
    ) -> int:
        """The path of the last answer is the conversation: every turn sampled, each as it was told.

        Says how many turns stand there as an equal sibling, sampled for a try that never got through.
        """
        if not talk or len(nodes.by_call.get(talk[-1][0].call, [])) <= talk[-1][1]:
            return 0  # nothing said yet, or lost, and counted as that
        last, choice = talk[-1]
        path = [node for node in nodes.path(nodes.by_call[last.call][choice]) if node["call"] is not None]
        if len(path) != len(talk):
            self.violations.append(f"{episode.id}: {agent} had {len(talk)} turns, its path {len(path)}")
            return 0
        for node, (told, choice) in zip(path, talk, strict=True):
            if nodes.split(node) != (told.prompt_ids, told.outputs[choice]):
                self.violations.append(f"{episode.id}: {told.call} is not on the path of {agent}")
        return sum(node["call"] != told.call for node, (told, _) in zip(path, talk, strict=True))

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
            f"{episode.id}: {told.call} is not trained" for told in episode.answers if told.call in dropped
        ]

    async def _get(self, path: str, key: str) -> Any:
        response = await self._http.get(self._url + path, headers={"authorization": f"Bearer {key}"})
        assert response.status_code == 200, f"{path}: {response.status_code} {response.text}"
        return response.json()

    # -- the account ---------------------------------------------------------------------------------

    def table(self) -> str:
        phases = [phase.name.lower() for phase in Phase]
        lines = [f"{'killed':14}{'kills':>7}" + "".join(f"{name:>12}" for name in phases) + f"{'retries':>9}"]
        for place in (*KillPoint, OUTSIDE, "all"):
            rows = [kill for kill in self.killed if place in (kill.place, "all")]
            cut = [sum(kill.in_flight[phase] for kill in rows) for phase in Phase]
            lines.append(
                f"{place:14}{len(rows):7}"
                + "".join(f"{number:12}" for number in cut)
                + f"{sum(kill.process.retries for kill in rows):9}"
            )
        told = [told for episode in self.episodes for told in episode.answers]
        lines.append(
            f"{len(self.episodes)} sessions, {len(told)} acknowledged replies with "
            f"{sum(one.tokens for one in told)} tokens: lost {len(self.lost)}, "
            f"violations {len(self.violations)}; {self.twins} turns stand on an equal sibling"
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
        """What stands before a sampled output on its path, and the output."""
        ids = [token for one in self.path(node) for token in one["ids"]]
        count, origin = node["spans"][-1]
        assert origin == "sampled"
        return ids[:-count], ids[-count:]


def _free_port() -> int:
    """A port below those that the kernel gives to outgoing connections: it stays free between two lives."""
    for port in Random().sample(range(20_000, 32_000), 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("no free port")


def _run_kills(folder: Path, places: Sequence[str], seed: int, limit_s: float) -> KillHarness:
    async def run() -> KillHarness:
        ordeal = KillHarness(folder, seed)
        async with asyncio.timeout(limit_s):
            await ordeal.run(places)
        return ordeal

    started = time.monotonic()
    ordeal = asyncio.run(run())
    print(f"\nseed {seed}, {time.monotonic() - started:.1f} s\n{ordeal.table()}")
    assert Counter(kill.place for kill in ordeal.killed) == Counter(places)
    assert any(episode.answers for episode in ordeal.episodes)
    assert not ordeal.lost, ordeal.lost[:10]
    assert not ordeal.violations, ordeal.violations[:10]
    return ordeal


def test_three_kills_lose_nothing_acknowledged(tmp_path: Path) -> None:
    _run_kills(tmp_path, [KillPoint.QUEUED, KillPoint.JOURNALED, KillPoint.FINISHED], seed=1, limit_s=60)


@pytest.mark.slow
def test_fifty_kills_under_load_lose_nothing_acknowledged(tmp_path: Path) -> None:
    seed = int(os.environ.get("BRANCHLINE_KILL_SEED", "0")) or Random().randrange(1, 2**31)
    rng = Random(seed)
    # Every place four times, in any order behind the first; the rest from outside, at any moment.
    places: list[str] = [place for place in KillPoint for _ in range(4)]
    places += [OUTSIDE] * (49 - len(places))
    rng.shuffle(places)
    places = [KillPoint.JOURNALED, *places]  # a first process has nothing to replay
    ordeal = _run_kills(tmp_path, places, seed, limit_s=240)
    cut = np.sum([kill.in_flight for kill in ordeal.killed], axis=0)
    assert (cut > 0).all(), "no kill cut a call in some phase"
