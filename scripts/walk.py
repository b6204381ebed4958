"""Prints the functions of branchline that one streamed turn passes through, in order of first call.

    python scripts/walk.py

An agent has two turns with a Qwen3 model: Chat Completions over HTTP, streamed, through a gateway with a
journal to a scripted vLLM server on loopback. The first turn samples a tool call, the second receives its
result. Only the second one is profiled, on all threads. The last line counts files, functions and the call
depth: the longest chain of branchline functions on one stack. Comprehensions, lambdas and generator
expressions belong to the function that contains them.
"""

from __future__ import annotations

import asyncio
import http.client
import inspect
import json
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from urllib.parse import urlsplit

from tokenizers import Tokenizer

import branchline
from branchline import Gateway, GenericCodec, VllmEngine

SOURCE = str(Path(branchline.__file__).parent) + "/"
QWEN3 = Path(__file__).parent.parent / ".cache" / "tokenizers" / "qwen3"

_TOOL_CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
REPLIES = (
    f"<think>\nI need the weather.\n</think>\n\n{_TOOL_CALL}<|im_end|>",
    "<think>\nIt rains.\n</think>\n\nTake an umbrella.<|im_end|>",
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]


# -- profile ---------------------------------------------------------------------------------------------


class CallRecorder:
    """A profile function that records the functions of branchline while `recording` is set."""

    def __init__(self) -> None:
        self.recording = False
        self.calls: dict[tuple[str, str], int] = {}
        """Number of calls by file and function, in order of first call; resumed coroutines count again."""
        self.deepest: list[str] = []
        self._names: dict[CodeType, tuple[str, str] | None] = {}

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event != "call" or not self.recording:
            return
        function = self._function(frame.f_code)
        if function is None:
            return
        self.calls[function] = self.calls.get(function, 0) + 1
        stack = self._stack(frame)
        if len(stack) > len(self.deepest):
            self.deepest = stack

    def _function(self, code: CodeType) -> tuple[str, str] | None:
        """The file and the named function that contains the code; None for other code and for imports."""
        if code not in self._names:
            self._names[code] = self._name(code)
        return self._names[code]

    @staticmethod
    def _name(code: CodeType) -> tuple[str, str] | None:
        is_function_body = code.co_flags & inspect.CO_NEWLOCALS  # not the body of a module or a class
        if not code.co_filename.startswith(SOURCE) or not is_function_body:
            return None
        name = code.co_qualname
        for anonymous in ("<lambda>", "<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>"):
            name = name.split(f".<locals>.{anonymous}")[0]
        if "<lambda>" in name:  # of a module or a class, so no function contains it
            return None
        return code.co_filename.removeprefix(SOURCE), name

    def _stack(self, frame: FrameType | None) -> list[str]:
        """The branchline functions on the stack, outermost first, without anonymous frames."""
        stack: list[str] = []
        while frame is not None:
            function = self._function(frame.f_code)
            if function is not None and not frame.f_code.co_name.startswith("<"):
                stack.append(":".join(function))
            frame = frame.f_back
        return stack[::-1]

    def report(self) -> Iterator[str]:
        files: dict[str, list[str]] = {}
        for (file, function), count in self.calls.items():
            files.setdefault(file, []).append(f"    {function}" + (f"  ×{count}" if count > 1 else ""))
        for file, functions in files.items():
            yield file
            yield from functions
        yield "deepest call chain:"
        yield from (f"    {function}" for function in self.deepest)
        yield f"{len(files)} files, {len(self.calls)} functions, call depth {len(self.deepest)}"


# -- scripted vLLM ---------------------------------------------------------------------------------------


@contextmanager
def scripted_vllm(outputs: Sequence[Sequence[int]]) -> Iterator[str]:
    """The URL of a server that streams these outputs in order, one token per event, as vLLM does."""
    remaining = iter(outputs)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            body = b'{"data": [{"id": "qwen3", "max_model_len": 32768}]}'
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["content-length"])))
            ids = next(remaining)
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            for index, token in enumerate(ids):
                choice = {
                    "index": 0,
                    "token_ids": [token],
                    "logprobs": {"token_logprobs": [-0.5]},
                    "finish_reason": "stop" if index == len(ids) - 1 else None,
                    "prompt_token_ids": request["prompt"] if index == 0 else None,
                }
                self._send_chunk(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")
                time.sleep(0.002)  # so that the stream has more than one event
            self._send_chunk(b"data: [DONE]\n\n")
            self._send_chunk(b"")

        def _send_chunk(self, data: bytes) -> None:
            self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


# -- agent -----------------------------------------------------------------------------------------------


def stream_chat(
    connection: http.client.HTTPConnection, path: str, api_key: str, messages: list[dict[str, Any]]
) -> dict[str, Any]:
    """Sends one streamed chat completion and returns the assistant message of its deltas."""
    body = {"model": "qwen3", "messages": messages, "tools": TOOLS, "stream": True}
    headers = {"authorization": f"Bearer {api_key}", "content-type": "application/json"}
    connection.request("POST", f"{path}/chat/completions", json.dumps(body), headers)
    response = connection.getresponse()
    if response.status != 200:
        raise SystemExit(f"status {response.status}: {response.read().decode()}")
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    for line in response:
        if line.startswith(b"data: {"):
            for choice in json.loads(line[6:])["choices"]:
                message["content"] += choice["delta"].get("content") or ""
                for call in choice["delta"].get("tool_calls") or ():
                    message["tool_calls"] = [{key: call[key] for key in ("id", "type", "function")}]
    return message


async def run_turns(recorder: CallRecorder, journal: Path) -> None:
    tokenizer = Tokenizer.from_file(str(QWEN3 / "tokenizer.json"))
    outputs = [tokenizer.encode(text, add_special_tokens=False).ids for text in REPLIES]
    with scripted_vllm(outputs) as url:
        engine = VllmEngine(url)
        await engine.ready()
        async with Gateway(engine=engine, codec=GenericCodec.open(QWEN3), journal=journal) as gateway:
            session = await gateway.session()
            gateway_url = urlsplit(session.base_url)
            connection = http.client.HTTPConnection(gateway_url.netloc, timeout=60)
            address = (connection, gateway_url.path, session.api_key)
            messages: list[dict[str, Any]] = [{"role": "user", "content": "Do I need an umbrella in Oslo?"}]
            reply = await asyncio.to_thread(stream_chat, *address, messages)
            result = {"role": "tool", "tool_call_id": reply["tool_calls"][0]["id"], "content": "rain"}
            messages += [reply, result]

            recorder.recording = True
            reply = await asyncio.to_thread(stream_chat, *address, messages)
            recorder.recording = False
            connection.close()

            assert reply["content"].strip() == "Take an umbrella.", reply
            (sample,) = (await session.export()).samples
            assert sample.trained_tokens == sum(map(len, outputs)), sample


def main() -> None:
    recorder = CallRecorder()
    threading.setprofile(recorder)
    sys.setprofile(recorder)
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(run_turns(recorder, Path(folder) / "walk.journal"))
    sys.setprofile(None)
    print("\n".join(recorder.report()))


if __name__ == "__main__":
    main()
