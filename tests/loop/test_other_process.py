from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from branchline import export_samples
from branchline.loop.agent_loop import AgentLoop
from branchline.loop.http_model import HttpModel
from branchline.loop.registry import ToolRegistry
from branchline.loop.state import LoopPhase, LoopState, StopReason
from branchline.loop.timeouts import CancelToken
from tests.gateway.harness import agent
from tests.loop import resume_worker
from tests.loop.harness import (
    LoopScript,
    ResumableScriptedEngine,
    ScriptedToolCall,
    ScriptedTurn,
    encode_answers,
    loop_harness,
    run,
)

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("phase", [LoopPhase.GENERATING, LoopPhase.PROCESSING_TOOLS])
def test_a_cancelled_loop_is_resumed_in_another_process(phase: LoopPhase) -> None:
    async def test() -> None:
        points = (4,) if phase is LoopPhase.GENERATING else ()
        script = LoopScript(
            (
                ScriptedTurn("let me see", tool_calls=(ScriptedToolCall(),) * 2),
                ScriptedTurn("so it is", cancel_points=points),
            )
        )
        async with loop_harness(script) as s:
            codec = s.codec
        engine = ResumableScriptedEngine(
            encode_answers(codec, script), [turn.cancel_points for turn in script.turns]
        )
        async with agent(engine=engine, codec=codec) as a:  # type: ignore[arg-type]
            url, key = a.session.base_url, a.session.api_key
            state = LoopState.begin(s.task(), "remote")
            cancel = CancelToken()
            async with HttpModel(url, key) as model:
                tools = ToolRegistry([resume_worker.act])
                async with AgentLoop(model, state, tools=tools.select()) as loop:
                    running = asyncio.create_task(loop.run(cancel))
                    if phase is LoopPhase.GENERATING:
                        await engine.at_cancel_point.wait()
                    else:
                        while state.phase is not phase:
                            await asyncio.sleep(0)
                    cancel.cancel()
                    assert (await running).is_cancelled
            assert state.phase is phase
            other = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "tests.loop.resume_worker", url, key),
                cwd=ROOT,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
            )
            written, _ = await other.communicate(state.encode())
            assert other.returncode == 0
            again = LoopState.decode(written)
            assert (again.stop_reason, again.trajectory, again.is_cancelled) == (
                StopReason.STOP,
                "remote",
                False,
            )
            assert [m.content for m in again.messages[2:]] == [
                *["let me see", "done elsewhere: 0, 0", "done elsewhere: 0, 1", "so it is"]
            ]
            report = export_samples(a.session.managed.session.tree).report
            assert report.sampled_tokens == report.trained_tokens == sum(len(ids) for ids in engine.answers)

    run(test)
