"""Agent loops side by side on generated tasks: a calculator, a search, a tutor. Nothing has to be installed.

    python examples/loop/run.py                in process
    python examples/loop/run.py --over-http    through a gateway on loopback: the same, token for token

The model is scripted: it knows the way but not always the answer. In the middle of it all the policy changes:
every loop is cancelled at once, wherever it is, and goes on under the new version behind its own tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from branchline import (
    AgentContext,
    CancelToken,
    HttpModel,
    InteractionRegistry,
    LoopLimits,
    LoopOutput,
    LoopState,
    Message,
    SessionModel,
    Task,
    ToolCall,
    ToolRegistry,
    ToyCodec,
    build_output,
    check_tasks,
    run_agent,
)
from branchline.core.token_arrays import Ids
from branchline.engines.base import Chunk, SamplingParams
from branchline.engines.scripted import ScriptedEngine, ScriptedRequest
from branchline.gateway.server import Gateway
from branchline.loop.model import Model
from branchline.runtime.managed_session import SessionOptions
from branchline.runtime.session_store import SessionStore
from examples.loop.arithmetic import Calculator, Problem, problems
from examples.loop.search import Question, questions, search_tool, towns
from examples.loop.tutor import ArithmeticTutor, task_row

CODEC = ToyCodec.chatml()
GENERATION_PROMPT = CODEC.encode("\nassistant:")
CORPUS = towns()
LIMITS = LoopLimits(
    max_assistant_turns=6, tool_response_length=300, tool_response_side="right", tool_timeout_s=10
)


class ContinuingEngine(ScriptedEngine):
    """Goes on behind half an answer with the other half, as every model does and a script does not."""

    async def generate(
        self, prompt_ids: Ids, params: SamplingParams, *, session: str = ""
    ) -> AsyncGenerator[Chunk, None]:
        begun = (
            len(prompt_ids)
            - prompt_ids.tobytes().rfind(GENERATION_PROMPT.tobytes()) // 4
            - len(GENERATION_PROMPT)
        )
        params = replace(params, max_tokens=params.max_tokens + begun)
        prompt_ids = prompt_ids[: len(prompt_ids) - begun]
        async for chunk in super().generate(prompt_ids, params, session=session):
            # One id a chunk: what was said is not said again.
            begun -= 1
            if begun < 0:
                yield chunk


class ScriptedModel:
    """What the model says: it looks for a question it knows, and does the next thing."""

    def __init__(self, sums: Sequence[Problem], facts: Sequence[Question]) -> None:
        self._sums = {one.question: one for one in sums}
        self._facts = {one.text: one for one in facts}
        self.cancel_token: CancelToken | None = None
        """Cancelled when the model has been asked often enough: the trainer has new weights."""

    def reply(self, ask: ScriptedRequest) -> Message:
        if ask.call_index == 9 and self.cancel_token is not None:
            self.cancel_token.cancel()
        problem = next((one for text, one in self._sums.items() if text in ask.prompt_text), None)
        if problem is not None and "Answer with a number." in ask.prompt_text:
            tries = ask.prompt_text.count("Try again")
            return Message("assistant", f"I think it is {problem.answer if tries else problem.answer + 10}.")
        if problem is not None:
            return self._call_tool_or_answer(
                ask, "calculator", {"expression": problem.expression}, str(problem.answer)
            )
        fact = next(one for text, one in self._facts.items() if text in ask.prompt_text)
        return self._call_tool_or_answer(ask, "search", {"query": fact.text, "limit": 2}, fact.answer)

    @staticmethod
    def _call_tool_or_answer(
        ask: ScriptedRequest, tool: str, arguments: dict[str, object], answer: str
    ) -> Message:
        _, found, result = ask.prompt_text.rpartition("tool:")
        if not found:
            return Message("assistant", "Let me see.", tool_calls=(ToolCall(tool, json.dumps(arguments)),))
        return Message("assistant", f"It is {answer}." if answer in result else "I could not find out.")


async def run_tasks(*, over_http: bool) -> list[LoopOutput]:
    """All tasks at once, cancelled once, resumed, and read back."""
    sums, facts = problems(6, seed=1), questions(CORPUS, 3, seed=1)
    rows = (
        [one.task_row for one in sums[:3]]
        + [one.task_row for one in facts]
        + [task_row(one) for one in sums[3:]]
    )
    tasks = [Task.read({**row, "id": f"task-{place}"}) for place, row in enumerate(rows)]
    tools = ToolRegistry([Calculator(), search_tool(CORPUS)])
    interactions = InteractionRegistry([ArithmeticTutor()])
    check_tasks(tasks, tools, interactions)
    script = ScriptedModel(sums, facts)
    engine = ContinuingEngine(CODEC, script.reply, chunk_size=1)
    async with AsyncExitStack() as stack:
        models = await _models(stack, engine, len(tasks), over_http=over_http)

        async def run(states: Sequence[LoopState], cancel: CancelToken | None) -> list[LoopState]:
            settings = [AgentContext(model, tools, interactions, LIMITS, cancel) for model in models]
            return await asyncio.gather(*map(run_agent, states, settings))

        script.cancel_token = CancelToken()
        halves = await run([LoopState.begin(task) for task in tasks], script.cancel_token)
        engine.version += 1
        # A state is a value: this could as well be another process.
        states = await run([LoopState.decode(state.encode()) for state in halves], None)
        return [await build_output(state, model) for state, model in zip(states, models, strict=True)]


async def _models(
    stack: AsyncExitStack, engine: ScriptedEngine, count: int, *, over_http: bool
) -> Sequence[Model]:
    """A session for each task."""
    if not over_http:
        sessions = SessionStore(CODEC)
        return [SessionModel(sessions.open(SessionOptions())[0], engine) for _ in range(count)]
    gateway = await stack.enter_async_context(Gateway(engine=engine, codec=CODEC))
    opened = [await gateway.session() for _ in range(count)]
    return [
        await stack.enter_async_context(HttpModel(one.base_url, one.api_key, one.control_key, codec=CODEC))
        for one in opened
    ]


def print_outputs(outputs: Sequence[LoopOutput], console: Console) -> None:
    table = Table("task", "ended by", "turns", "sampled", "told", "versions", "cut", "reward")
    for output in outputs:
        state: LoopState = output.extra_fields["state"]
        sampled = int(output.response_mask.sum())
        versions = output.outputs[-1].response_versions
        table.add_row(
            state.task.id,
            str(state.stop_reason),
            str(output.num_turns),
            str(sampled),
            str(len(output.response_mask) - sampled),
            " ".join(str(version) for version in sorted({*versions.tolist()} - {-1})),
            str(output.metrics.num_preempted),
            "" if output.reward_score is None else f"{output.reward_score:g}",
        )
    console.print(table)
    for place in (0, -1):
        console.print("\nWhat is trained is bold:\n")
        console.print(_highlight_sampled(outputs[place]))


def _highlight_sampled(output: LoopOutput) -> Text:
    text = Text(CODEC.decode(output.prompt_ids), style="dim")
    edges = [0, *(output.response_mask[1:] != output.response_mask[:-1]).nonzero()[0] + 1, None]
    for start, end in pairwise(edges):
        style = "bold green" if output.response_mask[start] else "dim"
        text.append(CODEC.decode(output.response_ids[start:end]), style=style)
    return text


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--over-http", action="store_true", help="through a gateway on loopback")
    given = parser.parse_args(arguments)
    print_outputs(asyncio.run(run_tasks(over_http=given.over_http)), Console())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
