from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from branchline import export_samples
from branchline.loop.cancel import CancelToken
from branchline.loop.machine import AgentLoop
from branchline.loop.remote import HttpModel
from branchline.loop.state import Ending, LoopState, State
from branchline.loop.tools.registry import ToolRegistry
from tests.gateway.running import agent
from tests.loop import resuming
from tests.loop.playing import Deed, Script, Talker, Turn, spelled, stage
from tests.loop.running import run

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("where", [State.GENERATING, State.PROCESSING_TOOLS])
def test_a_cancelled_loop_goes_on_in_another_process(where: State) -> None:
    async def test() -> None:
        held = (4,) if where is State.GENERATING else ()
        script = Script((Turn("let me see", deeds=(Deed(),) * 2), Turn("so it is", holds=held)))
        async with stage(script) as s:
            codec = s.codec
        engine = Talker(spelled(codec, script), [turn.holds for turn in script.turns])
        async with agent(engine=engine, codec=codec) as a:  # type: ignore[arg-type]
            url, key = a.session.base_url, a.session.api_key
            state = LoopState.begin(s.task(), "far")
            cancel = CancelToken()
            async with HttpModel(url, key) as model:
                tools = ToolRegistry([resuming.deed])
                async with AgentLoop(model, state, tools=tools.select()) as loop:
                    running = asyncio.create_task(loop.run(cancel))
                    if where is State.GENERATING:
                        await engine.held.wait()
                    else:
                        while state.state is not where:
                            await asyncio.sleep(0)
                    cancel.cancel()
                    assert (await running).is_cancel
            assert state.state is where
            other = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "tests.loop.resuming", url, key),
                cwd=ROOT,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
            )
            written, _ = await other.communicate(state.encode())
            assert other.returncode == 0
            again = LoopState.decode(written)
            assert (again.reason, again.trajectory, again.is_cancel) == (Ending.STOP, "far", False)
            assert [m.text for m in again.messages[2:]] == [
                *["let me see", "done elsewhere: 0, 0", "done elsewhere: 0, 1", "so it is"]
            ]
            report = export_samples(a.session.live.session.tree).report
            assert report.sampled_tokens == report.trained_tokens == sum(len(ids) for ids in engine.answers)

    run(test)
