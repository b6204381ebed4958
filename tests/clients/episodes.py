"""A client's episode: a gateway, a scripted engine, the real program, and what the tree holds afterwards."""

from __future__ import annotations

import asyncio
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from branchline.core.echo import Equivalence
from branchline.export.samples import Export, export_samples
from branchline.gateway.server import Gateway
from branchline.timelines.causes import Judgement, judge
from branchline.timelines.diagnosis import Diagnosis, diagnose
from branchline.timelines.timeline import Timeline, timelines_of
from branchline.tree.tree import Tree
from tests.chat.families import codec_of
from tests.clients.engine import Crossed, Theatre
from tests.clients.programs import PROGRAMS, Program, Setting, prepare
from tests.clients.prompts import Stage, TemplateStage, ToyStage
from tests.clients.scripts import FIRST, SECOND
from tests.clients.table import Row


@dataclass(frozen=True)
class Episode:
    """What happened."""

    program: Program
    stage: Stage
    tree: Tree
    crossed: Sequence[Crossed]
    printed: Sequence[str]
    notes: dict[str, str]
    """The files that the agents wrote."""

    @property
    def judgement(self) -> Judgement:
        return judge(self.tree)

    @property
    def timelines(self) -> list[Timeline]:
        return timelines_of(self.tree)

    @property
    def export(self) -> Export:
        return export_samples(self.tree)

    @property
    def diagnoses(self) -> list[Diagnosis]:
        return [diagnose(self.tree, fork, self.stage.decode) for fork in self.judgement.forks]

    @property
    def row(self) -> Row:
        report = self.export.report
        tolerated = {echo.equivalence for call in self.tree.calls for echo in call.echoes}
        # In which order two helpers end is chance.
        tolerated.discard(Equivalence.REORDERED_RESULTS)
        return Row(
            self.program.name,
            self.program.package.version,
            self.stage.name,
            len(self.tree.calls),
            len({call.agent for call in self.tree.calls}),
            len(self.timelines),
            Counter(str(fork.cause) for fork in self.judgement.forks),
            tuple(sorted(map(str, tolerated))),
            report.sampled_tokens,
            report.trained_tokens + sum(entry.tokens for entry in report.dropped),
        )


@cache
def episode(name: str, codec: str) -> Episode:
    """A client's episode on the toy codec or on a real template; played once."""
    stage: Stage = ToyStage() if codec == "toy" else TemplateStage(codec_of(codec))
    return asyncio.run(_play(PROGRAMS[name], stage))


async def _play(program: Program, stage: Stage) -> Episode:
    with tempfile.TemporaryDirectory(prefix="branchline-") as folder:
        home, workspace = Path(folder) / "home", Path(folder) / "work"
        home.mkdir()
        workspace.mkdir()
        script = replace(program.script(workspace), thinks=stage.name == "toy")
        engine = Theatre(stage, script)
        async with Gateway(engine=engine, codec=stage.codec) as gateway:
            session = await gateway.session()
            setting = Setting(home, workspace, session.base_url, session.anthropic_base_url, session.api_key)
            prepare(program, setting)
            printed = [
                await program.run(setting, program.ask(setting, FIRST)),
                await program.run(setting, program.go_on(setting, SECOND)),
            ]
            notes = {path.stem: path.read_text().strip() for path in workspace.glob("*.txt")}
            return Episode(program, stage, session.live.session.tree, engine.crossed, printed, notes)
