"""A session that compacts the conversations of agents that cannot do it themselves, over HTTP."""

from __future__ import annotations

import asyncio

import pytest

from branchline.chat.toy import ToyCodec
from branchline.core.context_edits import DELETED_CONTENT
from branchline.core.errors import EngineError, InputError
from branchline.core.message import Message
from branchline.engines.scripted import ScriptedEngine
from branchline.gateway.server import Gateway
from branchline.loop.http_model import HttpModel
from branchline.runtime.compaction import Compaction, CompactionOptions, CompactionPolicy, DropOldest

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


def test_a_policy_that_fails_refuses_its_call_by_name_and_nothing_else_notices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Broken:
        def plan(self, messages: object, tokens: object, excess: int) -> Compaction | None:
            return Compaction((0, 99))

    def build_policy(options: CompactionOptions) -> CompactionPolicy:
        return Broken() if options.keep_last == 1 else DropOldest(options.keep_last)

    monkeypatch.setattr(CompactionOptions, "build_policy", build_policy)

    async def test() -> None:
        engine = ScriptedEngine(ToyCodec.chatml(), lambda request: f"answer: {LONG}")

        async def talk(gateway: Gateway, keep_last: int) -> None:
            compaction = {"trigger_tokens": 1000, "keep_last": keep_last}
            async with await HttpModel.open(gateway.url, gateway.admin_key, compaction=compaction) as model:
                history = [Message("user", "begin")]
                try:
                    for turn in range(5):
                        result = await model.ask(history)
                        history += [result.message, Message("user", f"question {turn}")]
                finally:
                    # What was sampled before is kept, and the session goes on.
                    samples = await model.samples()
                    assert samples
                    assert await model.count_tokens(history[:1])

        async with Gateway(engine=engine, codec=engine.codec) as gateway:
            broken, other, third = await asyncio.gather(
                talk(gateway, 1), talk(gateway, 2), talk(gateway, 1), return_exceptions=True
            )
            assert other is None
            for error in (broken, third):
                assert isinstance(error, EngineError)
                assert "compaction policy 'Broken': positions: got (0, 99), expected" in str(error)
            assert [managed.state for managed in gateway.sessions] == ["open"] * 3
            reports = [managed.export().report for managed in gateway.sessions]
            assert all(report.is_balanced and not report.dropped for report in reports)
            assert min(report.trained_tokens for report in reports) > 0

    asyncio.run(test())


@pytest.mark.parametrize(
    "compaction",
    [
        {"trigger_tokens": 0},
        {"trigger_tokens": True},
        {"trigger_tokens": "9"},
        {"trigger_tokens": 9, "keep_last": 0},
        {"trigger_tokens": 9, "target_tokens": -1},
        {"trigger_tokens": 9, "target_tokens": 10},
        {"trigger_tokens": 9, "policy": "drop"},
        {"trigger_tokens": 9, "policy": "summarize", "summary_instruction": " "},
        {"trigger_tokens": 9, "summary_instruction": ""},
        {},
    ],
)
def test_options_that_cannot_be_meant_are_refused_when_the_session_is_opened(compaction: object) -> None:
    async def test() -> None:
        engine = ScriptedEngine(ToyCodec.chatml(), lambda request: "answer")
        async with Gateway(engine=engine, codec=engine.codec) as gateway:
            with pytest.raises(InputError):
                await HttpModel.open(gateway.url, gateway.admin_key, compaction=compaction)
            assert list(gateway.sessions) == []

    asyncio.run(test())
