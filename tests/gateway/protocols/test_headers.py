"""The call id in a response header, and the list of models in the shape of each protocol."""

from __future__ import annotations

import anthropic
import openai
import pytest

from tests.gateway.harness import agent, run
from tests.gateway.protocols.protocol_clients import PROTOCOLS, post


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("stream", [False, True])
def test_call_id_is_in_the_response_header_of_the_protocol(protocol: str, stream: bool) -> None:
    name = "request-id" if protocol == "messages" else "x-request-id"

    async def test() -> None:
        async with agent("x") as a:
            answered = await post(a, protocol, "q", stream=stream)
            (call,) = a.session.managed.session.tree.calls
            assert answered.headers[name] == call.id
            refused = await post(a, protocol, "q", temperature="hot")
            assert refused.status_code == 400
            assert refused.headers[name] not in ("", call.id)

    run(test)


def test_openai_sdk_reads_the_id_and_the_models() -> None:
    async def test() -> None:
        async with (
            agent("x") as a,
            openai.AsyncOpenAI(base_url=a.session.base_url, api_key=a.session.api_key) as sdk,
        ):
            answer = await sdk.responses.create(model="m", input="q")
            assert answer._request_id == answer.id
            assert [model.id async for model in sdk.models.list()] == ["scripted", "branchline"]
            assert (await sdk.models.retrieve("m")).id == "m"

    run(test)


def test_anthropic_sdk_reads_the_id_and_the_models() -> None:
    async def test() -> None:
        async with (
            agent("x") as a,
            anthropic.AsyncAnthropic(base_url=a.session.anthropic_base_url, api_key=a.session.api_key) as sdk,
        ):
            answer = await sdk.messages.create(
                model="m", max_tokens=9, messages=[{"role": "user", "content": "q"}]
            )
            assert answer._request_id == answer.id
            listed = [(model.id, model.display_name, model.type) async for model in sdk.models.list()]
            assert listed == [("scripted", "scripted", "model"), ("branchline", "branchline", "model")]
            one = await sdk.models.retrieve("m")
            assert (one.id, one.display_name, one.created_at.year) == ("m", "m", 1970)

    run(test)
