"""Four replicas, of which one fails, one hangs and one lies, under the load of 200 sessions.

Before the faults each session has its home. While they last, every call gets an answer, some at a second
attempt, and every token is the one that the model samples after exactly the ids before it. After them every
session is at home again.
"""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.chat.harness import save_byte_level
from tests.engines.fake_model import continuation, float32, next_token
from tests.faults.conftest import FaultFigures
from tests.faults.replica_process import ROOT, TOKENS_PER_ANSWER, Replica, replica_process

pytestmark = pytest.mark.slow

SESSIONS, CONCURRENT = 200, 40
ATTEMPTS = 8
ADMIN = "ak-replicas"
FAULTS = ("", "fail", "hang", "lie")
TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


@dataclass
class Conversation:
    """A session as its client knows it."""

    id: str
    api_key: str
    control_key: str
    messages: list[dict[str, str]] = field(default_factory=list)
    answers: list[tuple[list[int], list[int]]] = field(default_factory=list)
    """Prompt ids and output ids of each answer that the client received."""


@contextmanager
def served_gateway(folder: Path, urls: Sequence[str]) -> Iterator[str]:
    """The URL of a `branchline serve` process with these replicas."""
    tokenizer = save_byte_level(folder / "model", chat_template=TEMPLATE, eos_token="<|end|>")
    # The fake model samples ids that the tokenizer does not have, as models with a padded vocabulary may.
    (tokenizer / "config.json").write_text(json.dumps({"vocab_size": 50_100}))
    command = [sys.executable, "-m", "branchline.cli", "serve", "--engine", "vllm", "--port", "0"]
    options = ["--tokenizer", str(tokenizer), "--journal", str(folder / "journal"), "--admin-key", ADMIN]
    options += ["--log-level", "warning"]
    timeouts = ["--first-token-timeout-s", "1", "--token-timeout-s", "1"]
    replicas = [part for url in urls for part in ("--engine-url", url)]
    with subprocess.Popen(
        [*command, *options, *timeouts, *replicas], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            match = re.search(r"on (http://\S+)", line)
            assert match is not None, f"the gateway did not start: {line!r}"
            yield match[1]
        finally:
            process.kill()


class Load:
    """Clients of the gateway, which repeat a call that fails."""

    def __init__(self, url: str, http: httpx.AsyncClient) -> None:
        self._url = url
        self._http = http
        self._slots = asyncio.Semaphore(CONCURRENT)
        self.conversations: list[Conversation] = []
        self.retries: Counter[str] = Counter()
        self.lost = 0
        self.slowest_s = 0.0

    async def open(self) -> None:
        for number in range(SESSIONS):
            headers = {"authorization": f"Bearer {ADMIN}"}
            response = await self._http.post(
                f"{self._url}/sessions", json={"id": f"s{number}"}, headers=headers
            )
            opened = response.raise_for_status().json()
            self.conversations.append(Conversation(f"s{number}", opened["api_key"], opened["control_key"]))

    async def run_turn(self, turn: int) -> None:
        """One turn of every session."""
        await asyncio.gather(*[self._ask(conversation, turn) for conversation in self.conversations])

    async def _ask(self, conversation: Conversation, turn: int) -> None:
        async with self._slots:
            started = time.monotonic()
            conversation.messages.append({"role": "user", "content": f"{conversation.id}, turn {turn}"})
            # Some clients are impatient: they disconnect before the gateway gives a replica up.
            timeout_s = 0.5 if turn == 2 and int(conversation.id[1:]) % 10 == 0 else 60.0
            for attempt in range(ATTEMPTS):
                is_streamed = (turn + int(conversation.id[1:])) % 2 == 0
                answer = await self._request(conversation, is_streamed, attempt, timeout_s)
                if answer is not None:
                    text, prompt_ids, ids = answer
                    conversation.messages.append({"role": "assistant", "content": text})
                    conversation.answers.append((prompt_ids, ids))
                    break
                timeout_s = 60.0
            else:
                self.lost += 1
            self.slowest_s = max(self.slowest_s, time.monotonic() - started)

    async def _request(
        self, conversation: Conversation, is_streamed: bool, attempt: int, timeout_s: float
    ) -> tuple[str, list[int], list[int]] | None:
        """Text, prompt ids and output ids of an answer; None if the call failed."""
        body = {
            "messages": conversation.messages,
            "max_tokens": TOKENS_PER_ANSWER,
            "return_token_ids": True,
            "stream": is_streamed,
        }
        headers = {"authorization": f"Bearer {conversation.api_key}"}
        if attempt:
            headers["x-stainless-retry-count"] = str(attempt)
        try:
            response = await self._http.post(
                f"{self._url}/v1/chat/completions", json=body, headers=headers, timeout=timeout_s
            )
        except httpx.TimeoutException:
            self.retries["client timeout"] += 1
            return None
        if response.status_code != 200:
            self.retries[f"status {response.status_code}"] += 1
            return None
        if not is_streamed:
            content = response.json()
            choice = content["choices"][0]
            return choice["message"]["content"] or "", content["prompt_token_ids"], choice["token_ids"]
        return self._read_stream(response.text)

    def _read_stream(self, text: str) -> tuple[str, list[int], list[int]] | None:
        events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
        prompt_ids: list[int] = []
        ids: list[int] = []
        content, is_finished = "", False
        for event in events:
            if "error" in event:
                self.retries["error in a stream"] += 1
                return None
            prompt_ids = event.get("prompt_token_ids", prompt_ids)
            for choice in event["choices"]:
                content += choice["delta"].get("content") or ""
                ids += choice.get("token_ids") or []
                is_finished = is_finished or choice["finish_reason"] is not None
        assert is_finished, text
        return content, prompt_ids, ids

    async def count_inexact(self) -> tuple[int, int]:
        """Tokens that are not what the model samples after the ids before them, as clients received them and
        as samples train them; and answers that clients received and no sample has."""
        inexact, missing = 0, 0
        for conversation in self.conversations:
            for prompt_ids, ids in conversation.answers:
                inexact += ids != continuation(prompt_ids, TOKENS_PER_ANSWER)[0]
            response = await self._http.get(
                f"{self._url}/sessions/{conversation.id}/samples",
                headers={"authorization": f"Bearer {conversation.control_key}"},
            )
            samples: list[dict[str, Any]] = response.raise_for_status().json()["samples"]
            trained: set[tuple[int, ...]] = set()
            for sample in samples:
                ids, first = [*sample["prompt_ids"], *sample["response_ids"]], len(sample["prompt_ids"])
                for offset, is_trained in enumerate(sample["response_mask"]):
                    if is_trained:
                        token, logprob = next_token(ids[: first + offset])
                        is_exact = token == ids[first + offset]
                        inexact += not (
                            is_exact and sample["response_logprobs"][offset] == float32([logprob])[0]
                        )
                        trained.add(tuple(ids[: first + offset + 1]))
            missing += sum((*prompt_ids, *ids) not in trained for prompt_ids, ids in conversation.answers)
        return inexact, missing

    async def failing_replicas(self) -> list[str]:
        response = await self._http.get(f"{self._url}/engines", headers={"authorization": f"Bearer {ADMIN}"})
        engines: list[dict[str, Any]] = response.raise_for_status().json()["engines"]
        return [engine["name"] for engine in engines if engine["failing"]]


def count_new_requests(replicas: Sequence[Replica], before: Sequence[int]) -> list[int]:
    return [replica.count_requests() - count for replica, count in zip(replicas, before, strict=True)]


def test_calls_are_exact_and_sessions_return_home_when_replicas_fail_hang_and_lie(
    tmp_path: Path, fault_figures: FaultFigures
) -> None:
    async def test(url: str, replicas: Sequence[Replica]) -> None:
        # The gateway closes idle connections after 5 s; a request must not meet that.
        limits = httpx.Limits(max_connections=None, keepalive_expiry=2)
        async with httpx.AsyncClient(timeout=60, limits=limits) as http:
            load = Load(url, http)
            await load.open()
            await load.run_turn(1)
            homes = [replica.count_requests() for replica in replicas]
            assert sum(homes) == SESSIONS
            for replica, fault in zip(replicas, FAULTS, strict=True):
                replica.set_fault(fault)
            for turn in (2, 3, 4):
                await load.run_turn(turn)
            failing = await load.failing_replicas()
            for replica in replicas:
                replica.set_fault("")
            async with asyncio.timeout(60):
                while await load.failing_replicas():
                    await asyncio.sleep(1)
                    # Checks begin with a call.
                    await load._ask(load.conversations[0], 0)
            before = [replica.count_requests() for replica in replicas]
            await load.run_turn(5)
            after = count_new_requests(replicas, before)
            inexact, missing = await load.count_inexact()
            note = f"homes {homes}, after the faults {after}, excluded {len(failing)}, "
            note += f"retries {dict(load.retries)}, slowest call {load.slowest_s:.1f} s"
            fault_figures.add("replicas", lost=load.lost + missing, inexact=inexact, note=note)
            assert (load.lost, missing, inexact) == (0, 0, 0)
            assert after == homes

    with ExitStack() as stack:
        replicas = [stack.enter_context(replica_process()) for _ in FAULTS]
        url = stack.enter_context(served_gateway(tmp_path, [replica.url for replica in replicas]))
        asyncio.run(test(url, replicas))
