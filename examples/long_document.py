"""A question about a 200,000-character document, answered in a context of 8,192 tokens.

    python examples/long_document.py --png budget.png

The document is outside the context. The model searches it, reads one chunk at a time, notes what it needs and
deletes what it has read. The same run without deletion fills the context and ends with the penalty. Both runs
are drawn as a chart, in the terminal and as a PNG. The exit status is 0 only if the first run gave the right
answer within the limit and the second ended with the penalty.

The model is scripted, so that this runs anywhere: it decides from its prompt alone, as a model does.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw
from rich.console import Console

from branchline import (
    GenericCodec,
    LoopLimits,
    Message,
    ScriptedEngine,
    SessionModel,
    Task,
    ToolCall,
    run_agent,
)
from branchline.core.context_edits import DELETED_CONTENT
from branchline.core.errors import BranchlineError
from branchline.engines.scripted import ScriptedRequest
from branchline.loop.agents import AgentContext
from branchline.loop.output import build_output
from branchline.loop.state import LoopState, StopReason
from branchline.runtime.managed_session import SessionOptions
from branchline.runtime.session_store import SessionStore
from branchline.timelines.causes import Cause, classify_forks

MODEL_LENGTH = 8192
DOCUMENT_CHARACTERS = 200_000
CHUNK_TOKENS = 1200
STATIONS = ["Arden", "Belmont", "Corvale", "Dunmere", "Eastwick"]
STATIONS += ["Farrow", "Glenrock", "Hollis", "Ivybridge", "Juniper"]
QUESTION = (
    f"The document describes a walk that begins at {STATIONS[0]}. Each station names the next one. "
    "At which station does the walk end?"
)
SYSTEM = "Answer questions about a document that you read with tools. Delete what you no longer need."
TOKENIZER = Path(__file__).resolve().parents[1] / ".cache" / "tokenizers" / "qwen3"
READING_TOOLS = ("buildIndex", "readChunk", "searchEngine", "note", "readNote", "finish")
WORDS = ["the", "a", "river", "field", "morning", "light", "stone", "house", "quiet", "road", "old", "wind"]
WORDS += ["garden", "letter", "winter", "harvest", "bell", "window", "distant", "slow", "bright", "market"]
WORDS += ["bridge", "evening", "silver", "cloud", "path", "story", "winding", "small", "heavy"]


def write_document(seed: int = 1) -> str:
    """Sentences without meaning, with the sentences of the walk among them, in random order."""
    rng = random.Random(seed)
    steps = [f"The station {here} leads to {there}." for here, there in pairwise(STATIONS)]
    steps.append(f"The station {STATIONS[-1]} is where the walk ends.")
    rng.shuffle(steps)
    sentences: list[str] = []
    length = 0
    while length < DOCUMENT_CHARACTERS:
        words = [rng.choice(WORDS) for _ in range(rng.randint(6, 14))]
        sentence = " ".join(words).capitalize() + "."
        sentences.append(sentence)
        length += len(sentence) + 1
    places = sorted(rng.sample(range(len(sentences)), len(steps)), reverse=True)
    for place, step in zip(places, steps, strict=True):
        sentences.insert(place, step)
    return " ".join(sentences)[:DOCUMENT_CHARACTERS]


# -- the model ---------------------------------------------------------------------------------------


def read_results(prompt: str) -> list[dict[str, Any]]:
    """The tool results in a prompt, in order; stubs included."""
    decoder = json.JSONDecoder()
    found = [decoder.raw_decode(prompt, match.start())[0] for match in re.finditer(r'\{"msg_id":', prompt)]
    return sorted(found, key=lambda fields: fields["msg_id"])


def answer(request: ScriptedRequest, *, deletes: bool) -> Message:
    """The model's next step, from its prompt alone."""
    results = read_results(request.prompt_text)
    last = results[-1] if results else {}
    noted = re.findall(r'"next": "(\w*)"', request.prompt_text.replace("\\", ""))
    if not results:
        return step("I index the document.", ToolCall("buildIndex", json.dumps({"chunk_size": CHUNK_TOKENS})))
    if "notes" in last:
        return step(
            "The notes have the whole walk.", ToolCall("finish", json.dumps({"answer": last_station(last)}))
        )
    if "retrieved_chunks" in last:
        chunk_id = best_chunk(last["retrieved_chunks"], noted[-1] if noted else STATIONS[0])
        return step("I read the best match.", ToolCall("readChunk", json.dumps({"chunk_id": chunk_id})))
    if "retrieved_chunk" in last:
        return note_station(last["retrieved_chunk"], noted[-1] if noted else STATIONS[0], results, deletes)
    if noted and not noted[-1]:
        return step("The walk ends here. I read my notes.", ToolCall("readNote", "{}"))
    keyword = f"station {noted[-1] if noted else STATIONS[0]} leads"
    return step("I search for the station.", ToolCall("searchEngine", json.dumps({"keyword": keyword})))


def step(text: str, *calls: ToolCall) -> Message:
    return Message("assistant", text, tool_calls=calls)


def best_chunk(hits: Sequence[dict[str, Any]], station: str) -> int:
    """The first hit that shows the station itself, else the most relevant."""
    wanted = re.compile(rf"station\W+{station}\W")
    return int(next((hit for hit in hits if wanted.search(hit["highlights"])), hits[0])["chunk_id"])


def note_station(chunk: str, station: str, results: Sequence[dict[str, Any]], deletes: bool) -> Message:
    """Notes the next station and deletes everything that was read for it."""
    match = re.search(rf"The station {station} leads to (\w+)\.", chunk)
    note = {
        "key": station,
        "summary": f"after {station}",
        "content": json.dumps({"next": match[1] if match else ""}),
    }
    calls = [ToolCall("note", json.dumps(note))]
    if deletes:
        shown = [one for one in results if one.get("message") != DELETED_CONTENT]
        ids = {one[name] for one in shown for name in ("msg_id", "msg_id(invoking_assistant)")}
        calls.append(ToolCall("deleteContext", json.dumps({"message_ids": sorted(ids)})))
    return step(f"I note what follows {station}.", *calls)


def last_station(notes: dict[str, Any]) -> str:
    return str(list(notes["notes"])[-1])


# -- the runs ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunResult:
    """One trajectory: what came out, and the length of its context after every answer."""

    state: LoopState
    lengths: list[int]
    samples: int
    deletions: int
    is_balanced: bool


async def run(codec: GenericCodec, document: str, *, deletes: bool) -> RunResult:
    engine = ScriptedEngine(codec, lambda request: answer(request, deletes=deletes), chunk_size=64)
    managed, _, _ = SessionStore(codec).open(SessionOptions())
    model = SessionModel(managed, engine)
    task = Task(
        (Message("system", SYSTEM), Message("user", QUESTION)),
        agent_name="state",
        tools=(*READING_TOOLS, *(("deleteContext",) if deletes else ())),
        documents={"walk.txt": document},
        limits=LoopLimits(model_length=MODEL_LENGTH, max_assistant_turns=100),
    )
    state = await run_agent(LoopState.begin(task, "with" if deletes else "without"), AgentContext(model))
    forks = classify_forks(managed.session.tree).forks
    return RunResult(
        state,
        [one.prompt_tokens + one.tokens for one in state.answers],
        len((await build_output(state, model)).outputs),
        sum(fork.cause == Cause.CONTEXT_DELETE for fork in forks),
        managed.export().report.is_balanced,
    )


def check(with_deletion: RunResult, without: RunResult) -> list[str]:
    """What is not as it should be."""
    state, context = with_deletion.state, with_deletion.state.context
    problems: list[str] = []
    if state.stop_reason is not StopReason.FINISH or context is None or context.final_answer != STATIONS[-1]:
        answered = None if context is None else context.final_answer
        problems.append(f"with deletion: {state.stop_reason}, answer {answered!r}, expected {STATIONS[-1]!r}")
    if max(with_deletion.lengths) > MODEL_LENGTH:
        problems.append(
            f"with deletion: {max(with_deletion.lengths)} tokens, expected at most {MODEL_LENGTH}"
        )
    if with_deletion.deletions != len(STATIONS):
        problems.append(f"with deletion: {with_deletion.deletions} branches, expected {len(STATIONS)}")
    if without.state.stop_reason is not StopReason.MODEL_LENGTH or without.state.reward_score != -1.0:
        problems.append(
            f"without deletion: {without.state.stop_reason} and reward {without.state.reward_score}, "
            "expected model_length and -1.0"
        )
    if not (with_deletion.is_balanced and without.is_balanced):
        problems.append("a sampled token is neither trained nor reported")
    return problems


# -- the chart ---------------------------------------------------------------------------------------


def draw_text(
    runs: Sequence[tuple[str, str, Sequence[int]]], rows: int = 16, limit: int = MODEL_LENGTH
) -> str:
    """A chart of characters: one column per answer; each run is a name, a character and its lengths."""
    width = max(len(lengths) for _, _, lengths in runs)
    grid = [[" "] * width for _ in range(rows)]
    for _, mark, lengths in runs:
        for column, length in enumerate(lengths):
            grid[min(rows - 1, length * rows // limit)][column] = mark
    lines = [f"{limit:>6} ┤{'─' * width}"]
    for row in reversed(range(rows)):
        label = f"{limit * row // rows:>6}" if row % 4 == 0 else " " * 6
        lines.append(f"{label} │{''.join(grid[row])}")
    lines.append(" " * 7 + "└" + "─" * width + " answers")
    lines += [f"        {mark} {name}" for name, mark, _ in runs]
    return "\n".join(lines)


def draw_png(runs: Sequence[tuple[str, str, Sequence[int]]], path: Path, limit: int = MODEL_LENGTH) -> None:
    """The same chart as a PNG."""
    width, height, left, top, right, bottom = 900, 420, 70, 30, 20, 60
    image = Image.new("RGB", (width, height), "white")
    draw = ImageDraw.Draw(image)
    count = max(len(lengths) for _, _, lengths in runs)

    def point(index: int, length: int) -> tuple[float, float]:
        x = left + (width - left - right) * index / max(1, count - 1)
        return x, height - bottom - (height - top - bottom) * length / (limit * 1.05)

    for length in range(0, limit + 1, limit // 8):
        _, y = point(0, length)
        draw.line([(left, y), (width - right, y)], fill="#dddddd")
        draw.text((left - 45, y - 6), str(length), fill="black")
    _, y = point(0, limit)
    draw.line([(left, y), (width - right, y)], fill="#b00020", width=2)
    draw.text((left + 5, y - 14), "the model's length", fill="#b00020")
    for (name, _, lengths), colour in zip(runs, ("#1f6fb2", "#e07b00"), strict=True):
        points = [point(index, length) for index, length in enumerate(lengths)]
        draw.line(points, fill=colour, width=3)
        for x, y in points:
            draw.ellipse([x - 3, y - 3, x + 3, y + 3], fill=colour)
        draw.text((points[-1][0] - 60, points[-1][1] + 8), name, fill=colour)
    draw.text((width // 2 - 80, height - 25), "answers; tokens of prompt and answer", fill="black")
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--png", type=Path, default=Path("long_document.png"), help="where the chart is written"
    )
    parser.add_argument("--tokenizer", default=str(TOKENIZER), help="a folder or the name of a model")
    options = parser.parse_args(arguments)
    try:
        codec = GenericCodec.open(options.tokenizer)
    except BranchlineError as error:
        print(f"--tokenizer: {error}", file=sys.stderr)
        return 2
    document = write_document()
    with_deletion = asyncio.run(run(codec, document, deletes=True))
    without = asyncio.run(run(codec, document, deletes=False))
    runs = [
        ("with deletion", "●", with_deletion.lengths),
        ("without deletion", "×", without.lengths),
    ]
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"A document of {len(document):,} characters ({len(codec.encode(document)):,} tokens).")
    console.print(draw_text(runs), markup=False)
    for name, result in (("with deletion", with_deletion), ("without deletion", without)):
        state = result.state
        final = None if state.context is None else state.context.final_answer
        console.print(
            f"{name}: {state.assistant_turns} answers, at most {max(result.lengths)} tokens, "
            f"{result.samples} samples, ended by {state.stop_reason}, answer {final}, "
            f"reward {state.reward_score}"
        )
    draw_png(runs, options.png)
    console.print(f"The chart is in {options.png}.")
    problems = check(with_deletion, without)
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
