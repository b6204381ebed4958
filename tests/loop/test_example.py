from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from examples.loop.run import run_tasks

from branchline.loop.output import LoopOutput
from branchline.loop.state import LoopState
from tests.loop.clock_runner import run

ROOT = Path(__file__).resolve().parents[2]


def test_the_example_gives_the_same_tokens_in_process_and_over_http() -> None:
    async def test() -> None:
        near, far = [await run_tasks(over_http=over_http) for over_http in (False, True)]
        assert [_comparable(output) for output in near] == [_comparable(output) for output in far]
        assert [output.reward_score for output in near] == [1.0] * 3 + [None] * 3 + [0.75] * 3
        answers = [_state(output).messages[-1].content for output in near[3:6]]
        assert all(
            _state(output).task.extra["answer"] in answer
            for output, answer in zip(near[3:6], answers, strict=True)
        )
        versions = {version for output in near for version in output.outputs[-1].response_versions.tolist()}
        assert versions == {-1, 0, 1}
        assert sum(output.metrics.num_preempted for output in near) > 0

    run(test)


def _state(output: LoopOutput) -> LoopState:
    state: LoopState = output.extra_fields["state"]
    return state


def _comparable(output: LoopOutput) -> Any:
    ids = [(one.prompt_ids.tolist(), one.response_ids.tolist()) for one in output.outputs]
    return ids, output.response_mask.tolist(), output.response_logprobs.tolist(), output.num_turns


def test_the_example_runs_as_a_script_from_anywhere(tmp_path: Path) -> None:
    script = ROOT / "examples" / "loop" / "run.py"
    done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "interaction" in done.stdout
    assert "What is trained is bold" in done.stdout
