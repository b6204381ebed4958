"""A session that compacts the conversations of agents that cannot do it themselves, over HTTP."""

from __future__ import annotations

import asyncio

import pytest

from branchline.chat.toy import ToyCodec
from branchline.core.context_edits import DELETED_CONTENT
from branchline.core.message import Message
from branchline.engines.scripted import ScriptedEngine
from branchline.gateway.server import Gateway
from branchline.loop.http_model import HttpModel

LONG = "a text that fills the context, " * 8


@pytest.mark.parametrize("policy", ["drop_oldest", "drop_least_important", "summarize"])
def test_an_agent_that_sends_its_whole_history_stays_below_the_limit(policy: str) -> None:
    async def test() -> None:
        engine = ScriptedEngine(ToyCodec.chatml(), lambda request: f"answer {request.call_index}: {LONG}")
        compaction = {"trigger_tokens": 1500, "policy": policy, "keep_last": 3}
        async with (
            Gateway(engine=engine, codec=engine.codec) as gateway,
            await HttpModel.open(gateway.url, gateway.admin_key, compaction=compaction) as model,
        ):
            history = [Message("user", "begin")]
            for turn in range(8):
                result = await model.ask(history)
                assert len(result.prompt_ids) <= 1500
                history += [result.message, Message("user", f"question {turn}")]
            text = engine.codec.decode(engine.received_prompts[-1])
            assert f"question {turn - 1}" in text
            assert (DELETED_CONTENT in text) == (policy != "summarize")
            (managed,) = gateway.sessions
            report = managed.export().report
            assert report.is_balanced
            assert not report.dropped
            samples = await model.samples()
            assert sum(float(one.shares.sum()) for one in samples) == pytest.approx(report.sampled_tokens)

    asyncio.run(test())
