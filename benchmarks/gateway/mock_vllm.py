"""A mock vLLM server with precomputed responses.

rllm-model-gateway requests `/v1/chat/completions`, VllmEngine requests `/v1/completions`. Both return the
same ids and logprobs; streams have one token per event, or `stream_interval` tokens, as vLLM's do.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any

import msgspec
import uvicorn

from benchmarks.gateway.mock_engine import LOGPROB, MockOptions
from benchmarks.gateway.server_process import answer_commands

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class MockVllm:
    """The server as an ASGI application."""

    def __init__(self, options: MockOptions) -> None:
        self._options = options
        self._frame = {"id": "cmpl-0", "created": 1_750_000_000, "model": "mock"}
        ids, texts, prompt_ids = options.ids, options.texts, options.prompt_ids
        logprobs = [_logprob(text) for text in texts]
        response = {
            **self._frame,
            "object": "chat.completion",
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": "".join(texts)},
                    "logprobs": {"content": logprobs},
                    "finish_reason": "stop",
                    "stop_reason": None,
                    "token_ids": ids,
                }
            ],
            "usage": {
                "prompt_tokens": len(prompt_ids),
                "completion_tokens": len(ids),
                "total_tokens": len(prompt_ids) + len(ids),
            },
            "prompt_token_ids": prompt_ids,
        }
        self._chat_response = msgspec.json.encode(response)
        self._chat_events = [
            self._event(
                {
                    "index": 0,
                    "delta": {"role": "assistant", "content": text} if index == 0 else {"content": text},
                    "logprobs": {"content": [logprobs[index]]},
                    "finish_reason": "stop" if index == len(ids) - 1 else None,
                    "token_ids": [ids[index]],
                },
                {"prompt_token_ids": prompt_ids} if index == 0 else {},
            )
            for index, text in enumerate(texts)
        ]
        self._later_events = {1: self._events_after_first(1)}
        """The events after the first token, by the number of tokens in each."""

    def _events_after_first(self, size: int) -> list[bytes]:
        count = len(self._options.ids)
        return [self._event(self._choice(start, min(start + size, count))) for start in range(1, count, size)]

    def _choice(self, start: int, end: int) -> dict[str, Any]:
        """The choice of a `/v1/completions` event with these tokens."""
        texts = self._options.texts[start:end]
        logprobs = {
            "text_offset": [0] * len(texts),
            "token_logprobs": [LOGPROB] * len(texts),
            "tokens": texts,
            "top_logprobs": [{text: LOGPROB} for text in texts],
        }
        return {
            "index": 0,
            "text": "".join(texts),
            "logprobs": logprobs,
            "finish_reason": "stop" if end == len(self._options.ids) else None,
            "stop_reason": None,
            "token_ids": self._options.ids[start:end],
        }

    def _event(self, choice: dict[str, Any], extra: dict[str, Any] | None = None) -> bytes:
        event = {**self._frame, **(extra or {}), "choices": [choice]}
        return b"data: " + msgspec.json.encode(event) + b"\n\n"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        path = scope["path"]
        if path == "/v1/completions":
            request = msgspec.json.decode(body)
            first = {**self._choice(0, 1), "prompt_token_ids": request["prompt"]}
            size = 1 if self._options.is_old else request.get("stream_interval", 1)
            if size not in self._later_events:
                self._later_events[size] = self._events_after_first(size)
            await self._stream(send, [self._event(first), *self._later_events[size]])
        elif path == "/v1/chat/completions":
            if msgspec.json.decode(body).get("stream"):
                await self._stream(send, self._chat_events)
            else:
                await _send_json(send, self._chat_response)
        elif path == "/v1/models":
            await _send_json(send, b'{"data":[{"id":"mock"}]}')
        else:
            await _send_json(send, b"{}")

    async def _stream(self, send: Send, events: Sequence[bytes]) -> None:
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for event in events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
            await asyncio.sleep(self._options.pause_s)
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})


def _logprob(text: str) -> dict[str, Any]:
    return {"token": text, "logprob": LOGPROB, "bytes": list(text.encode()), "top_logprobs": []}


async def _send_json(send: Send, body: bytes) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def main(options: MockOptions) -> None:
    # asyncio disables Nagle's algorithm only if the protocol is named.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    config = uvicorn.Config(
        MockVllm(options), timeout_keep_alive=600, log_level="warning", access_log=False, lifespan="off"
    )
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started:
        await asyncio.sleep(0.01)
    await answer_commands({"url": f"http://127.0.0.1:{listener.getsockname()[1]}"}, {})
    server.should_exit = True
    await serving


if __name__ == "__main__":
    asyncio.run(main(msgspec.json.decode(sys.argv[1].encode(), type=MockOptions)))
