"""Concurrent agent loops on generated tasks: a calculator, a search, a tutor. They need no model.

    python examples/loop/run.py                in process
    python examples/loop/run.py --over-http    through a gateway on loopback, with the same tokens

The model is scripted. In the middle of the run the policy changes: every loop is cancelled and resumed under
the new version, after the tokens it had sampled.
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
    CancelToken,
    HttpModel,
    LoopLimits,
    LoopOutput,
    Message,
    SessionModel,
    Task,
    ToolCall,
    ToyCodec,
    run_agent,
)
from branchline.chat.vision import ImageSpan
from branchline.core.token_arrays import Ids
from branchline.engines.base import Chunk, SamplingParams
from branchline.engines.scripted import ScriptedEngine, ScriptedRequest
from branchline.gateway.server import Gateway
from branchline.loop.agents import AgentContext, check_tasks
from branchline.loop.model import Model
from branchline.loop.output import build_output
from branchline.loop.registry import InteractionRegistry, ToolRegistry
from branchline.loop.state import LoopState
from branchline.runtime.managed_session import SessionOptions
from branchline.runtime.session_store import SessionStore
from examples.loop.arithmetic import Calculator, Problem, problems
from examples.loop.search import Question, questions, search_tool, towns
from examples.loop.tutor import ArithmeticTutor, task_row

CODEC = ToyCodec.chatml()
GENERATION_PROMPT = CODEC.encode("\nassistant:")
CORPUS = towns()
LIMITS = LoopLimits(
    max_assistant_turns=6, tool_response_length=300, tool_response_keep="head", tool_timeout_s=10
)


class ContinuingEngine(ScriptedEngine):
    """Continues a partial answer at the end of the prompt, as a model does."""

    async def generate(
        self,
        prompt_ids: Ids,
        params: SamplingParams,
        *,
        session: str = "",
        images: Sequence[ImageSpan] = (),
    ) -> AsyncGenerator[Chunk, None]:
        done = (
            len(prompt_ids)
            - prompt_ids.tobytes().rfind(GENERATION_PROMPT.tobytes()) // 4
            - len(GENERATION_PROMPT)
        )
        params = replace(params, max_tokens=params.max_tokens + done)
        prompt_ids = prompt_ids[: len(prompt_ids) - done]
        async for chunk in super().generate(prompt_ids, params, session=session, images=images):
            # Chunks have one id each; those that the prompt contains are skipped.
            done -= 1
            if done < 0:
                yield chunk


class ScriptedModel:
    """The model's answers: it finds a known question in the prompt and takes the next step."""

    def __init__(self, sums: Sequence[Problem], facts: Sequence[Question]) -> None:
        self._sums = {one.question: one for one in sums}
        self._facts = {one.text: one for one in facts}
        self.cancel_token: CancelToken | None = None
        """Cancelled at the tenth call, as for a weight update."""

    def reply(self, request: ScriptedRequest) -> Message:
        if request.call_index == 9 and self.cancel_token is not None:
            self.cancel_token.cancel()
        problem = next((one for text, one in self._sums.items() if text in request.prompt_text), None)
        if problem is not None and "Answer with a number." in request.prompt_text:
            tries = request.prompt_text.count("Try again")
            return Message("assistant", f"I think it is {problem.answer if tries else problem.answer + 10}.")
        if problem is not None:
            return self._call_tool_or_answer(
                request, "calculator", {"expression": problem.expression}, str(problem.answer)
            )
        fact = next(one for text, one in self._facts.items() if text in request.prompt_text)
        return self._call_tool_or_answer(request, "search", {"query": fact.text, "limit": 2}, fact.answer)

    @staticmethod
    def _call_tool_or_answer(
        request: ScriptedRequest, tool: str, arguments: dict[str, object], answer: str
    ) -> Message:
        _, found, result = request.prompt_text.rpartition("tool:")
        if not found:
            return Message("assistant", "Let me see.", tool_calls=(ToolCall(tool, json.dumps(arguments)),))
        return Message("assistant", f"It is {answer}." if answer in result else "I could not find out.")


async def run_tasks(*, over_http: bool) -> list[LoopOutput]:
    """Runs all tasks concurrently, cancels them once, resumes them, and returns their outputs."""
    sums, facts = problems(6, seed=1), questions(CORPUS, 3, seed=1)
    rows = (
        [one.task_row for one in sums[:3]]
        + [one.task_row for one in facts]
        + [task_row(one) for one in sums[3:]]
    )
    tasks = [Task.read({**row, "id": f"task-{index}"}) for index, row in enumerate(rows)]
    tools = ToolRegistry([Calculator(), search_tool(CORPUS)])
    interactions = InteractionRegistry([ArithmeticTutor()])
    check_tasks(tasks, tools, interactions)
    script = ScriptedModel(sums, facts)
    engine = ContinuingEngine(CODEC, script.reply, chunk_size=1)
    async with AsyncExitStack() as stack:
        models = await _models(stack, engine, len(tasks), over_http=over_http)

        async def run(states: Sequence[LoopState], cancel: CancelToken | None) -> list[LoopState]:
            contexts = [AgentContext(model, tools, interactions, LIMITS, cancel) for model in models]
            return await asyncio.gather(*map(run_agent, states, contexts))

        script.cancel_token = CancelToken()
        cancelled = await run([LoopState.begin(task) for task in tasks], script.cancel_token)
        engine.version += 1
        # A state is a value: another process could resume it.
        states = await run([LoopState.decode(state.encode()) for state in cancelled], None)
        return [await build_output(state, model) for state, model in zip(states, models, strict=True)]


async def _models(
    stack: AsyncExitStack, engine: ScriptedEngine, count: int, *, over_http: bool
) -> Sequence[Model]:
    """One session for each task."""
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
    table = Table("task", "ended by", "turns", "sampled", "context", "policy", "cancels", "reward")
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
            str(output.metrics.num_cancelled),
            "" if output.reward_score is None else f"{output.reward_score:g}",
        )
    console.print(table)
    for index in (0, -1):
        console.print("\nTrained tokens are bold:\n")
        console.print(_highlight_sampled(outputs[index]))


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
    options = parser.parse_args(arguments)
    print_outputs(asyncio.run(run_tasks(over_http=options.over_http)), Console())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
