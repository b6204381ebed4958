"""Clients that ask for what is not here learn what to use instead, at the first request."""

from __future__ import annotations

from typing import Any

import agents
import openai
import pytest
from agents.memory import OpenAIConversationsSession, OpenAIResponsesCompactionSession
from anthropic import AsyncAnthropic, NotFoundError

from branchline.gateway.config import GatewayConfig
from tests.gateway.harness import Agent, agent, run

UPGRADE = {
    "connection": "Upgrade",
    "upgrade": "websocket",
    "sec-websocket-version": "13",
    "sec-websocket-key": "eHh4eHh4eHh4eHh4eHh4eA==",
}


def openai_client(a: Agent, requests: list[str]) -> openai.AsyncOpenAI:
    """A client that repeats what it may repeat, and what it has sent."""

    async def note(request: Any) -> None:
        requests.append(f"{request.method} {request.url.path.partition('/v1/')[2]}")

    http = openai.DefaultAsyncHttpxClient(event_hooks={"request": [note]})
    return openai.AsyncOpenAI(base_url=a.session.base_url, api_key=a.session.api_key, http_client=http)


# -- WebSockets --------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/sessions/{id}/v1/responses", "/v1/responses", "/agents/x/v1/realtime"])
def test_websocket_of_the_model_api_is_answered_with_426(path: str) -> None:
    async def test() -> None:
        async with agent("x") as a:
            url = a.gateway.url + path.format(id=a.session.id)
            answer = await a.http.get(url, headers={**UPGRADE, **a.api_headers})
            assert answer.status_code == 426
            assert answer.headers["upgrade"] == "HTTP/1.1"
            error = answer.json()["error"]
            assert error["code"] == "websocket_not_supported"
            assert "HTTP POST" in error["message"]
            # The connection is still good for HTTP.
            body = {"input": "p"}
            answered = await a.http.post(f"{a.session.base_url}/responses", json=body, headers=a.api_headers)
            assert answered.json()["output"][0]["content"][0]["text"] == "x"

    run(test)


def test_other_upgrades_and_other_paths_are_answered_as_plain_http() -> None:
    async def test() -> None:
        async with agent("x") as a:
            assert (await a.http.get(f"{a.gateway.url}/healthz", headers=UPGRADE)).status_code == 200
            body = {"input": "p"}
            h2c = {"connection": "Upgrade, HTTP2-Settings", "upgrade": "h2c", "http2-settings": "AAMAAABk"}
            answer = await a.http.post(
                f"{a.session.base_url}/responses", json=body, headers={**a.api_headers, **h2c}
            )
            assert answer.status_code == 200

    run(test)


# -- what is not here --------------------------------------------------------------------------------


def test_sessions_of_openai_agents_fail_at_the_first_request() -> None:
    async def test() -> None:
        requests: list[str] = []
        async with agent("x") as a, openai_client(a, requests) as client:
            with pytest.raises(openai.NotFoundError, match="SQLiteSession") as raised:
                await OpenAIConversationsSession(openai_client=client).get_items()
            assert raised.value.code == "not_supported"
            assert requests == ["POST conversations"]
            items: list[Any] = [{"role": "user", "content": "p"}]
            known = OpenAIConversationsSession(conversation_id="conv_1", openai_client=client)
            actions: list[tuple[str, Any]] = [
                ("GET conversations/conv_1/items", known.get_items),
                (
                    "POST conversations/conv_1/items",
                    lambda: known.add_items(items),
                ),
                ("GET conversations/conv_1/items", known.pop_item),
                ("DELETE conversations/conv_1", known.clear_session),
            ]
            for request, act in actions:
                requests.clear()
                with pytest.raises(openai.NotFoundError, match="send the whole input"):
                    await act()
                assert requests == [request]

    run(test)


def test_compaction_of_openai_agents_fails_at_the_first_request() -> None:
    async def test() -> None:
        requests: list[str] = []
        async with agent("x") as a, openai_client(a, requests) as client:
            stored = agents.SQLiteSession("s")
            session = OpenAIResponsesCompactionSession("s", stored, client=client, compaction_mode="input")
            await session.add_items([{"role": "user", "content": "p"}])
            with pytest.raises(openai.NotFoundError, match="open the session with `compaction`"):
                await session.run_compaction({"force": True})
            assert requests == ["POST responses/compact"]
            stored.close()

    run(test)


@pytest.mark.parametrize(
    ("method", "path", "hint"),
    [
        ("POST", "embeddings", "serves and records language models"),
        ("GET", "files", "serves and records language models"),
        ("POST", "images/generations", "serves and records language models"),
        ("POST", "batches", "send each request as a call"),
        ("DELETE", "responses/resp_1", "keeps every response"),
        ("POST", "responses/resp_1/cancel", "close the connection"),
        ("GET", "responses/resp_1/input_items", "/sessions/{id}/timelines"),
        ("POST", "threads/t/runs", "send the whole input"),
        ("GET", "chat/completions/chatcmpl-1", "/sessions/{id}/timelines"),
        ("DELETE", "models/m", "/engines"),
        ("POST", "v1/chat/completions", "adds /v1 itself"),
        ("GET", "", "under a base URL are chat/completions"),
        ("GET", "nothing", "under a base URL are chat/completions"),
    ],
)
def test_known_endpoints_say_what_to_use_instead(method: str, path: str, hint: str) -> None:
    async def test() -> None:
        async with agent("x") as a:
            for headers in (a.api_headers, {}):  # no key is needed to learn it
                answer = await a.http.request(method, f"{a.session.base_url}/{path}", headers=headers)
                assert answer.status_code == 404
                assert hint in answer.json()["error"]["message"]
            assert not a.engine.received_prompts

    run(test)


def test_anthropic_clients_get_their_own_envelope() -> None:
    async def test() -> None:
        async with agent("x") as a:
            base_url, key = a.session.anthropic_base_url, a.session.api_key
            with pytest.raises(NotFoundError, match="send each request as a call") as raised:
                async with AsyncAnthropic(base_url=base_url, api_key=key) as client:
                    await client.messages.batches.list()
            assert isinstance(raised.value.body, dict)
            assert raised.value.body["error"]["type"] == "not_found_error"

    run(test)


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("/health", "/healthz"),
        ("/docs", "/openapi.json"),
        ("/chat/completions", "ends with /v1"),
        ("/sessions/{id}/responses", "ends with /v1"),
    ],
)
def test_paths_that_are_asked_for_by_mistake_say_so(path: str, hint: str) -> None:
    async def test() -> None:
        async with agent("x") as a:
            for method in ("GET", "POST"):
                answer = await a.http.request(method, a.gateway.url + path.format(id=a.session.id))
                assert answer.status_code == 404
                assert hint in answer.json()["error"]["message"]

    run(test)


# -- GET / -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("auth", [True, False])
def test_index_says_what_this_is_and_leaks_nothing(auth: bool) -> None:
    async def test() -> None:
        async with agent("x", config=GatewayConfig(auth=auth, admin_key="ak-secret")) as a:
            answer = await a.http.get(f"{a.gateway.url}/")
            index = answer.json()
            assert index["name"] == "branchline"
            assert index["version"]
            assert f"{a.gateway.url}/sessions" in index["open_a_session"]
            for path in index["documents"].values():
                assert (await a.http.get(a.gateway.url + path)).status_code == 200
            for secret in ("ak-secret", a.session.id, a.session.api_key, "scripted"):
                assert secret not in answer.text
            head = await a.http.head(f"{a.gateway.url}/")
            assert (head.status_code, head.content) == (200, b"")
            assert (await a.http.post(f"{a.gateway.url}/")).status_code == 405

    run(test)


def test_command_of_the_index_opens_a_session() -> None:
    async def test() -> None:
        async with agent("x") as a:
            command = (await a.http.get(a.gateway.url)).json()["open_a_session"]
            url = command.split(" ")[3]
            opened = await a.http.post(url, headers=a.admin_headers)
            assert opened.status_code == 201

    run(test)
