"""A session whose tokens are spoken for makes its loops wait, and not fail."""

from __future__ import annotations

import asyncio

from branchline.chat.toy import ToyCodec
from branchline.core.message import Message
from branchline.engines.scripted import ScriptedEngine
from branchline.loop.model import SessionModel
from branchline.runtime.managed_session import SessionLimits, SessionOptions
from branchline.runtime.session_store import SessionStore


def test_calls_beside_each_other_wait_for_the_tokens_that_others_hold() -> None:
    async def test() -> None:
        codec = ToyCodec.chatml()
        engine = ScriptedEngine(codec, lambda _: "hello", chunk_size=1)
        live, _, _ = SessionStore(codec).open(SessionOptions(limits=SessionLimits(tokens=200)))
        model = SessionModel(live, engine)
        asked = [
            model.ask([Message("user", f"ask {number}")], params={"max_tokens": 150}) for number in range(6)
        ]
        replies = await asyncio.gather(*asked)
        assert [reply.message.content for reply in replies] == ["hello"] * 6

    asyncio.run(test())
