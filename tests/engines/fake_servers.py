"""Fake inference servers on loopback: real HTTP in front of the model of `fake_model.py`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any, Literal, Self

from tests.engines.fake_model import EOS, next_token

PLACEHOLDER = 777
"""The placeholder id of images."""
FOREIGN_ID = 60_000
"""An id outside the vocabulary of the model."""
Lie = Literal["id", "logprob", "after_finish", "too_many", "index"]
"""What a server sends that cannot be right: an id outside the vocabulary, a positive logprob, ids after the
finish reason, more ids than asked for, another choice than the only one."""


class FakeServer:
    """Streams the response to `POST generate_path`; answers other paths from `json_by_path`, else 404."""

    generate_path = ""

    def __init__(self) -> None:
        self.weights = 0
        self.ids_per_event = 1
        """Number of ids in each event."""
        self.supports_stream_interval = False
        """Whether it obeys `stream_interval`: one id in the first event, then that many in each."""
        self.write_size = 0
        """Bytes of each write; 0: one event each."""
        self.hold_after: int | None = None
        """After this many ids of a request, wait for `proceed`."""
        self.yields_between_events = False
        """Lets other tasks run between two events."""
        self.hold_end = False
        """Between the last event and the end of the response, wait for `proceed`."""
        self.die_after: int | None = None
        """After this many ids the server dies."""
        self.end_after: int | None = None
        """After this many ids the stream ends without a finish reason."""
        self.event_after: tuple[int, dict[str, Any]] | None = None
        """After this many ids the stream ends with this event."""
        self.refusal: tuple[int, bytes] | None = None
        self.refusal_for: Callable[[Any], tuple[int, bytes] | None] = lambda body: None
        """Returns the refusal of a generation request by its body; None accepts it."""
        self.refused_id: int | None = None
        """If set, only requests whose prompt contains this id get the refusal."""
        self.retry_after = ""
        """The Retry-After header of a refusal."""
        self.response_headers: dict[str, str] = {}
        """Further headers of the responses to generation requests."""
        self.json_by_path: dict[str, Any] = {}
        self.failing_paths: set[str] = set()
        """Paths that answer 500."""
        self.stop_at: int | None = None
        """The number of ids before EOS."""
        self.lie: Lie | None = None
        self.lie_at = 0
        """The number of ids before the first that is a lie."""
        self.is_held = asyncio.Event()
        self.proceed = asyncio.Event()
        self.aborted = asyncio.Event()
        self.requests: list[tuple[str, Any]] = []
        self.connections = 0
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        await self.listen()
        return self

    async def listen(self, port: int = 0) -> None:
        self._server = await asyncio.start_server(self._on_connect, "127.0.0.1", port)
        self.port = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    async def restart(self) -> None:
        """Listens again at the same address, after `kill`."""
        await self.listen(self.port)

    async def __aexit__(self, *_: object) -> None:
        self.kill()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def kill(self) -> None:
        """Refuses new connections and aborts the open ones."""
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()

    @property
    def bodies(self) -> list[dict[str, Any]]:
        """The bodies of the generation requests, in order."""
        return [body for path, body in self.requests if path == self.generate_path]

    @property
    def _choice_index(self) -> int:
        return int(self.lie == "index")

    def request_paths(self) -> list[str]:
        return [path for path, _ in self.requests]

    def events(self, body: dict[str, Any]) -> AsyncGenerator[Any, None]:
        """Each event as an object, or as its bytes."""
        raise NotImplementedError

    async def tokens(
        self, prompt: list[int], limit: int, stop_ids: list[int], interval: int | None = None
    ) -> AsyncGenerator[tuple[list[int], list[float], str | None], None]:
        """The sampled ids and logprobs of each event, with the finish reason on the last."""
        assert prompt
        ids, out = list(prompt), 0
        event: tuple[list[int], list[float]] = ([], [])
        finish = None
        stop_after = limit + 2 if self.lie == "too_many" else limit
        while finish is None:
            for count, action in ((self.hold_after, self._hold), (self.die_after, self._die)):
                if count == out and not event[0]:
                    await action()
            if out in (self.end_after, (self.event_after or [None])[0]):
                return
            token, logprob = (EOS, -0.5) if out == self.stop_at else next_token(ids, self.weights)
            if self.lie in ("id", "logprob") and out == self.lie_at:
                token, logprob = (FOREIGN_ID, logprob) if self.lie == "id" else (token, 0.5)
            ids.append(token)
            event[0].append(token)
            event[1].append(logprob)
            out += 1
            finish = "stop" if token in (EOS, *stop_ids) else "length" if out == stop_after else None
            size, first = (
                (interval, 1) if interval and self.supports_stream_interval else (self.ids_per_event, 0)
            )
            if finish or out % size == first % size:
                yield event[0], event[1], finish
                event = ([], [])
        if self.lie == "after_finish":
            token, logprob = next_token(ids, self.weights)
            yield [token], [logprob], None

    async def _hold(self) -> None:
        self.is_held.set()
        await self.proceed.wait()

    async def _die(self) -> None:
        self.is_held.set()
        self.kill()
        await asyncio.Event().wait()

    def _on_connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.add(writer)
        task = asyncio.create_task(self._serve(reader, writer))
        self._tasks.add(task)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                _, path, _ = head[0].split(" ")
                headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
                raw = await reader.readexactly(int(headers.get("content-length", 0)))
                body = json.loads(raw or b"null")
                self.requests.append((path, body))
                refusal = self._refusal(body) if path == self.generate_path else None
                if path == self.generate_path and refusal is None:
                    await self._stream_response(reader, writer, body)
                else:
                    self._send_response(writer, path, refusal)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    def _refusal(self, body: dict[str, Any]) -> tuple[int, bytes] | None:
        prompt = body.get("prompt") or body.get("input_ids") or ()
        is_refused = self.refused_id is None or self.refused_id in prompt
        return self.refusal if self.refusal is not None and is_refused else self.refusal_for(body)

    def _send_response(
        self, writer: asyncio.StreamWriter, path: str, refusal: tuple[int, bytes] | None
    ) -> None:
        status, content = 404, b'{"detail": "Not Found"}'
        if refusal is not None and path == self.generate_path:
            status, content = refusal
        elif path in self.failing_paths:
            status, content = 500, b"broken"
        elif path in self.json_by_path:
            value = self.json_by_path[path]
            status, content = 200, b"" if value is None else json.dumps(value).encode()
        head = f"HTTP/1.1 {status} X\r\ncontent-length: {len(content)}\r\n"
        if self.retry_after:
            head += f"retry-after: {self.retry_after}\r\n"
        writer.write((head + self._header_lines() + "\r\n").encode() + content)

    def _header_lines(self) -> str:
        return "".join([f"{name}: {value}\r\n" for name, value in self.response_headers.items()])

    async def _stream_response(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: dict[str, Any]
    ) -> None:
        """Streams until the end or until the client disconnects."""
        disconnect = asyncio.create_task(reader.read(1))
        sending = asyncio.create_task(self._send_events(writer, body))
        await asyncio.wait([disconnect, sending], return_when=asyncio.FIRST_COMPLETED)
        if not sending.done():
            sending.cancel()
            self.aborted.set()
        disconnect.cancel()
        for outcome in await asyncio.gather(disconnect, sending, return_exceptions=True):
            if isinstance(outcome, AssertionError):
                raise outcome

    async def _send_events(self, writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n"
            + self._header_lines().encode()
            + b"\r\n"
        )
        unsent = b""
        async for event in self.events(body):
            data = event if isinstance(event, bytes) else json.dumps(event).encode()
            unsent += b"data: " + data + b"\n\n"
            unsent = self._write(writer, unsent, self.write_size)
            await writer.drain()
            if self.yields_between_events:
                await asyncio.sleep(0)
        if self.hold_end:
            await self._hold()
        if self.event_after is not None:
            unsent += b"data: " + json.dumps(self.event_after[1]).encode() + b"\n\n"
        self._write(writer, unsent + b": a comment\n\ndata: [DONE]\n\n", 0)
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    def _write(self, writer: asyncio.StreamWriter, data: bytes, size: int) -> bytes:
        """Writes chunks of this size and returns the rest."""
        size = size or len(data)
        while data and len(data) >= size:
            part, data = data[:size], data[size:]
            writer.write(b"%x\r\n%b\r\n" % (len(part), part))
        return data


class FakeVllm(FakeServer):
    """`/v1/completions` as vLLM 0.27 streams it."""

    generate_path = "/v1/completions"
    add_to_prompt: tuple[int, ...] = ()
    placeholder_counts: tuple[int, ...] = ()
    """How often it repeats the placeholder of each image."""

    async def events(self, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        if "token_ids" in body:
            async for event in self._tokens_events(body):
                yield event
            return
        first = True
        async for ids, logprobs, finish in self.tokens(
            body["prompt"], body["max_tokens"], body["stop_token_ids"], body.get("stream_interval")
        ):
            choice: dict[str, Any] = {
                "index": self._choice_index,
                "text": "…",
                "logprobs": {
                    "text_offset": [0] * len(ids),
                    "token_logprobs": logprobs,
                    "tokens": ["…"] * len(ids),
                    "top_logprobs": [{"…": logprob} for logprob in logprobs],
                },
                "finish_reason": finish,
                "stop_reason": None,
                "token_ids": ids,
            }
            if first:
                choice["prompt_token_ids"] = [*body["prompt"], *self.add_to_prompt]
            first = False
            yield {"id": "cmpl-1", "object": "text_completion", "model": "m", "choices": [choice]}

    async def _tokens_events(self, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """`/inference/v1/generate`; `add_to_prompt` is added to the prompt that it reports."""
        prompt = expand_placeholders(body["token_ids"], self.placeholder_counts)
        sampling = body["sampling_params"]
        first = True
        async for ids, logprobs, finish in self.tokens(
            prompt, sampling["max_tokens"], sampling["stop_token_ids"]
        ):
            content = [
                {"token_id": token, "logprob": logprob, "rank": 1, "top_logprobs": []}
                for token, logprob in zip(ids, logprobs, strict=True)
            ]
            choice = {
                "index": self._choice_index,
                "token_ids": ids,
                "logprobs": {"content": content},
                "finish_reason": finish,
            }
            yield {
                "request_id": "r",
                "usage": None,
                "choices": [choice],
                **({"prompt_token_ids": [*prompt, *self.add_to_prompt]} if first else {}),
            }
            first = False


def expand_placeholders(ids: list[int], counts: tuple[int, ...]) -> list[int]:
    """The ids with each placeholder repeated, as a server does with its image processor."""
    remaining = iter(counts)
    return [
        token for id_ in ids for token in ([PLACEHOLDER] * next(remaining) if id_ == PLACEHOLDER else [id_])
    ]


class FakeSglang(FakeServer):
    """`/generate` as SGLang 0.5.18 streams it; unless `incremental`, events repeat the output so far."""

    generate_path = "/generate"
    incremental = False
    weight_versions: Mapping[int, str] = {0: "default"}
    """What it reports as `weight_version`, by the number of output ids from which on it does."""
    max_prompt: int | None = None
    """Longer prompts are cut."""
    placeholder_counts: tuple[int, ...] = ()
    """How often it repeats the placeholder of each image."""
    add_to_prompt: tuple[int, ...] = ()

    async def events(self, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        params = body["sampling_params"]
        all_ids: list[int] = []
        all_logprobs: list[list[Any]] = []
        prompt = expand_placeholders(body["input_ids"], self.placeholder_counts)[: self.max_prompt]
        seen = (
            {"prompt_token_ids": [*prompt, *self.add_to_prompt]}
            if body.get("return_prompt_token_ids")
            else {}
        )
        async for ids, logprobs, finish in self.tokens(
            prompt,
            params["max_new_tokens"],
            params["stop_token_ids"],
            params.get("stream_interval"),
        ):
            start = len(all_ids) if self.incremental else 0
            all_ids += ids
            all_logprobs += [[logprob, id_, None] for logprob, id_ in zip(logprobs, ids, strict=True)]
            reason = {"stop": {"type": "stop", "matched": ids[-1]}, "length": {"type": "length", "length": 1}}
            yield {
                **seen,
                **({"index": 1} if self.lie == "index" else {}),
                "text": "…",
                "output_ids": all_ids[start:],
                "meta_info": {
                    "id": body["rid"],
                    "finish_reason": reason.get(finish or ""),
                    "prompt_tokens": len(prompt),
                    "weight_version": self._weight_version(len(all_ids)),
                    "input_token_logprobs": [],
                    "output_token_logprobs": all_logprobs[start:],
                    "output_token_logprobs_length": len(all_ids),
                    "completion_tokens": len(all_ids),
                },
            }

    def _weight_version(self, count: int) -> str:
        return self.weight_versions[max(start for start in self.weight_versions if start <= count)]


class FakeChat(FakeServer):
    """`/v1/chat/completions`: sends scripted events."""

    generate_path = "/v1/chat/completions"
    scripted_events: tuple[dict[str, Any] | bytes, ...] = ()

    async def events(self, body: dict[str, Any]) -> AsyncGenerator[Any, None]:
        for event in self.scripted_events:
            yield event
        if self.hold_after is not None:
            await self._hold()
