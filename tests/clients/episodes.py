"""A client's episode: a gateway, a scripted engine, the real program, and the resulting tree."""

from __future__ import annotations

import asyncio
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from branchline.core.call import Equivalence
from branchline.export.samples import Export, export_samples
from branchline.gateway.server import Gateway
from branchline.timelines.causes import ForkReport, classify_forks
from branchline.timelines.diagnosis import Diagnosis, diagnose
from branchline.timelines.timeline import Timeline, timelines_of
from branchline.tree.tree import Tree
from tests.chat.families import load_codec
from tests.clients.programs import PROGRAMS, ClientEnvironment, ClientProgram, prepare
from tests.clients.prompt_readers import PromptReader, TemplatePromptReader, ToyPromptReader
from tests.clients.script_engine import RecordedGeneration, ScriptEngine
from tests.clients.scripts import FIRST_REQUEST, SECOND_REQUEST
from tests.clients.table import Row


@dataclass(frozen=True)
class Episode:
    """The results of one run."""

    program: ClientProgram
    prompt_reader: PromptReader
    tree: Tree
    generations: Sequence[RecordedGeneration]
    stdout: Sequence[str]
    notes: dict[str, str]
    """The files that the agents wrote."""

    @property
    def fork_report(self) -> ForkReport:
        return classify_forks(self.tree)

    @property
    def timelines(self) -> list[Timeline]:
        return timelines_of(self.tree)

    @property
    def export(self) -> Export:
        return export_samples(self.tree)

    @property
    def diagnoses(self) -> list[Diagnosis]:
        return [diagnose(self.tree, fork, self.prompt_reader.decode) for fork in self.fork_report.forks]

    @property
    def row(self) -> Row:
        report = self.export.report
        tolerated = {echo.equivalence for call in self.tree.calls for echo in call.applied_equivalences}
        # The order in which two sub-agents end varies.
        tolerated.discard(Equivalence.REORDERED_RESULTS)
        return Row(
            self.program.name,
            self.program.package.version,
            self.prompt_reader.name,
            len(self.tree.calls),
            len({call.agent for call in self.tree.calls}),
            len(self.timelines),
            Counter(str(fork.cause) for fork in self.fork_report.forks),
            tuple(sorted(map(str, tolerated))),
            report.sampled_tokens,
            report.trained_tokens + sum(entry.tokens for entry in report.dropped),
        )


@cache
def run_episode(name: str, codec: str) -> Episode:
    """A client's episode on the toy codec or on a real template; run once."""
    reader: PromptReader = ToyPromptReader() if codec == "toy" else TemplatePromptReader(load_codec(codec))
    return asyncio.run(_run(PROGRAMS[name], reader))


async def _run(program: ClientProgram, reader: PromptReader) -> Episode:
    with tempfile.TemporaryDirectory(prefix="branchline-") as folder:
        home, workspace = Path(folder) / "home", Path(folder) / "work"
        home.mkdir()
        workspace.mkdir()
        script = replace(program.script(workspace), has_reasoning=reader.name == "toy")
        engine = ScriptEngine(reader, script)
        async with Gateway(engine=engine, codec=reader.codec) as gateway:
            session = await gateway.session()
            environment = ClientEnvironment(
                home, workspace, session.base_url, session.anthropic_base_url, session.api_key
            )
            prepare(program, environment)
            stdout = [
                await program.run(environment, program.first_arguments(environment, FIRST_REQUEST)),
                await program.run(environment, program.resume_arguments(environment, SECOND_REQUEST)),
            ]
            notes = {path.stem: path.read_text().strip() for path in workspace.glob("*.txt")}
            return Episode(program, reader, session.managed.session.tree, engine.generations, stdout, notes)
