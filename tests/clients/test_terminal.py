"""Claude Code in a terminal: it requests a title in a side call."""

from __future__ import annotations

import asyncio
import json
import tempfile
from pathlib import Path

import pytest

from branchline.export.samples import export_samples
from branchline.gateway.server import Gateway
from branchline.runtime.call_record import CallRecord
from branchline.timelines.causes import Cause, classify_forks
from branchline.timelines.timeline import timelines_of
from tests.clients.programs import PROGRAMS, ClientEnvironment, claude_env, plain_env
from tests.clients.prompt_readers import ToyPromptReader
from tests.clients.script_engine import ScriptEngine
from tests.clients.scripts import FINAL_REPLIES, FIRST_REQUEST, TITLE
from tests.clients.terminal import terminal

CLAUDE = PROGRAMS["claude-code"]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CLAUDE.package.executable.exists(), reason="needs the clients: make test-clients"),
]


class CallWaiter:
    """Waits for the model's reply."""

    def __init__(self) -> None:
        self._ended: asyncio.Queue[CallRecord] = asyncio.Queue()

    def record_call(self, record: CallRecord) -> None:
        self._ended.put_nowait(record)

    async def wait_for_reply(self, *texts: str) -> None:
        missing = set(texts)
        while missing:
            record = await self._ended.get()
            if record.result is not None:
                missing.discard(record.result.answers[0].message.content)


def write_onboarding_config(setting: ClientEnvironment) -> str:
    """What the client would ask a new user: a colour, whether the key and the folder are to be trusted."""
    return json.dumps(
        {
            "hasCompletedOnboarding": True,
            "theme": "dark",
            "customApiKeyResponses": {"approved": [setting.api_key[-20:]], "rejected": []},
            "projects": {str(setting.workspace): {"hasTrustDialogAccepted": True}},
        }
    )


def test_title_is_a_side_call_and_the_work_is_one_timeline() -> None:
    async def main(folder: Path) -> None:
        home, workspace = folder / "home", folder / "work"
        home.mkdir()
        workspace.mkdir()
        stage, calls = ToyPromptReader(), CallWaiter()
        engine = ScriptEngine(stage, CLAUDE.script(workspace))
        async with Gateway(engine=engine, codec=stage.codec, observers=[calls.record_call]) as gateway:
            session = await gateway.session()
            setting = ClientEnvironment(
                home, workspace, session.base_url, session.anthropic_base_url, session.api_key
            )
            (home / ".claude.json").write_text(write_onboarding_config(setting))
            env = {**plain_env(setting), **claude_env(setting)}
            arguments = ("--allowedTools", "Bash,Read,Edit,Agent", "--", FIRST_REQUEST)
            async with terminal(CLAUDE.package.executable, arguments, env, workspace):
                await calls.wait_for_reply(TITLE, FINAL_REPLIES[0])
            tree = session.managed.session.tree
            judgement = classify_forks(tree)
            causes = [fork.cause for fork in judgement.forks]
            assert sorted(causes) == [Cause.SIDE_CALL, Cause.SUB_AGENT, Cause.SUB_AGENT]
            assert judgement.main_leaf is not None
            assert judgement.main_leaf.message.content == FINAL_REPLIES[0]
            lines = timelines_of(tree)
            assert sorted(len(line.calls) for line in lines) == [1, 2, 2, 5]
            report = export_samples(tree).report
            assert report.trained_tokens == report.sampled_tokens

    with tempfile.TemporaryDirectory(prefix="branchline-") as folder:
        asyncio.run(asyncio.wait_for(main(Path(folder)), 120))
