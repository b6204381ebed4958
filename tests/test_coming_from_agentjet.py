"""docs/coming-from-agentjet.md: every row of its tables is run by the check of the same name."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from branchline import ToyCodec
from branchline.cli.main import parse_options
from branchline.cli.merge import run as run_merge
from branchline.core.token_arrays import as_ids
from branchline.engines.scripted import replies
from branchline.gateway.config import GatewayConfig
from branchline.runtime.router import Router
from branchline.runtime.routing_rule import RoutingRule
from tests.cli.test_merge_samples import DRIFT_AND_TOOLS, SEARCH
from tests.gateway.harness import Agent, agent
from tests.gateway.test_control_api_export import WithoutLogprobs
from tests.hang import fail_if_hung

PAGE = (Path(__file__).resolve().parents[1] / "docs" / "coming-from-agentjet.md").read_text()
ROWS = re.findall(r"^\| `([^`]+)`", PAGE, re.MULTILINE)
DRIFTED, OTHER_TOOLS = DRIFT_AND_TOOLS[:2], DRIFT_AND_TOOLS[1:]
Check = Callable[[Path], Awaitable[None]]
CHECKS: dict[str, Check] = {}


def check(row: str) -> Callable[[Check], Check]:
    def add(function: Check) -> Check:
        CHECKS[row] = function
        return function

    return add


@pytest.mark.parametrize("row", ROWS)
def test_every_row_is_true(row: str, tmp_path: Path) -> None:
    asyncio.run(fail_if_hung(CHECKS[row](tmp_path)))


def test_every_check_is_a_row() -> None:
    assert list(CHECKS) == ROWS


def test_the_commands_of_the_page_are_valid() -> None:
    for command in re.findall(r"`branchline (merge[^`]*|serve[^`]*)`", PAGE):
        arguments = command.replace("'", "").split()
        assert parse_options(*arguments, *(["calls.jsonl"] if arguments[0] == "merge" else []))


def test_the_command_with_the_defaults_of_agentjet_joins_what_it_joins(tmp_path: Path) -> None:
    match = re.search(r"^branchline merge calls.jsonl (.+)$", PAGE, re.MULTILINE)
    assert match is not None
    _, tokenizer, *options = match[1].split()
    assert tokenizer == "Qwen/Qwen3-8B"
    equal = [*DRIFT_AND_TOOLS, DRIFT_AND_TOOLS[0]]
    report = merge(tmp_path, equal, *options, balanced=False)
    assert len(report["timelines"]) == 1
    assert [entry["reason"] for entry in report["dropped"]] == ["duplicate"]


# -- merging -----------------------------------------------------------------------------------------


def merge(folder: Path, lines: list[dict[str, Any]], *options: str, balanced: bool = True) -> dict[str, Any]:
    """Runs `branchline merge --json`."""
    log = folder / "calls.jsonl"
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    report: dict[str, Any] = json.loads(run_merge(parse_options("merge", str(log), "--json", *options)))
    assert report["delivered_tokens"] == report["sampled_tokens"] or not balanced
    return report


async def post(a: Agent, path: str, body: Any) -> Any:
    response = await a.http.post(
        f"{a.gateway.url}/sessions/{a.session.id}{path}", json=body, headers=a.control_headers
    )
    assert response.status_code == 200, response.text
    return response.json()


def text_of(a: Agent, ids: list[int]) -> str:
    return a.engine.codec.decode(as_ids(ids))


async def two_turns(a: Agent, **second: Any) -> None:
    await a.ask_text("p")
    await a.ask_text("p", "A1", "q", **second)


@check("timeline_compare_level: text")
async def _(folder: Path) -> None:
    assert len(merge(folder, DRIFTED, "--inexact")["timelines"]) == 1
    async with agent("A1 ", "A2") as a:
        await two_turns(a)
        (timeline,) = await a.timelines()
        assert timeline["exact"]


@check("timeline_compare_level: token")
async def _(folder: Path) -> None:
    assert len(merge(folder, DRIFTED, "--compare", "token")["timelines"]) == 2


@check("ignore_tools: True")
async def _(folder: Path) -> None:
    report = merge(folder, OTHER_TOOLS, "--ignore-tools")
    assert (len(report["timelines"]), report["inexact_tokens"]) == (1, 11)
    async with agent("A1", "A2", ignore_tools=True) as a:
        await two_turns(a, tools=SEARCH)
        assert len(await a.timelines()) == 1
        assert "search" in a.prompts()[1]


@check("ignore_tools: False")
async def _(folder: Path) -> None:
    assert len(merge(folder, OTHER_TOOLS)["timelines"]) == 2
    async with agent("A1", "A2") as a:
        await two_turns(a, tools=SEARCH)
        causes = [node["cause"] for node in (await a.get("/tree"))["nodes"] if node["cause"]]
        assert causes == ["tools_changed"]


@check("fix_retokenization_drift: True")
async def _(folder: Path) -> None:
    repaired = merge(folder, DRIFTED, "--repair", "--stop-id", "9")
    assert repaired["repairs"] == [{"line": 2, "method": "stop_token"}]
    async with agent("A1", "A2") as a:
        await two_turns(a)
        (sample,) = (await a.get("/samples"))["samples"]
        assert sample["exact"]


@check("fix_retokenization_drift: False")
async def _(folder: Path) -> None:
    assert merge(folder, DRIFTED)["causes"] == {"drift": 1}
    assert len(merge(folder, DRIFT_AND_TOOLS)["timelines"]) == 3


@check("detect_timeline_snap: True")
async def _(folder: Path) -> None:
    (fork,) = merge(folder, DRIFTED)["forks"]
    assert (fork["cause"], fork["first_divergent_token"]) == ("drift", 10)
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign, assignment]
    logger = logging.getLogger("branchline.forks")
    logger.addHandler(handler)
    try:
        async with agent("A1", "A2", config=GatewayConfig(explain_forks=True)) as a:
            await a.ask_text("p")
            await a.ask_text("p", "edited", "q")
    finally:
        logger.removeHandler(handler)
    assert ["cause edit" in record.getMessage() for record in records] == [True]


# -- episodes ----------------------------------------------------------------------------------------


@check("begin_episode")
async def _(_folder: Path) -> None:
    async with agent("A1") as a:
        opened = await a.http.post(f"{a.gateway.url}/sessions", headers=a.admin_headers)
        assert {"base_url", "api_key", "control_key"} <= opened.json().keys()


@check("end_episode")
async def _(_folder: Path) -> None:
    async with agent("A1") as a:
        await a.ask_text("p")
        await post(a, "/reward", {"score": 1.0})
        (sample,) = (await post(a, "/finalize", {}))["samples"]
        assert sample["reward"] == 1.0


@check("abort_episode")
async def _(_folder: Path) -> None:
    async with agent("A1") as a:
        await a.ask_text("p")
        await post(a, "/abort", {})
        assert (await a.get("/samples"))["samples"] == []
        assert len((await a.get("/samples?include_aborted=true"))["samples"]) == 1


@check("WorkflowOutput.reward")
async def _(_folder: Path) -> None:
    async with agent("A1", "A2") as a:
        await a.ask_text("p")
        await a.ask_text("p")
        await post(a, "/reward", {"score": 1.0})
        assert [sample["reward"] for sample in (await a.get("/samples"))["samples"]] == [1.0, 1.0]


@check("WorkflowOutput.metadata")
async def _(_folder: Path) -> None:
    async with agent("A1", metadata={"answer": "4"}) as a:
        await a.ask_text("p")
        reward = {"score": 1.0, "extras": {"is_success": True}}
        session = await post(a, "/reward", reward)
        assert session["rewards"] == [reward]
        (sample,) = (await a.get("/samples"))["samples"]
        assert (sample["metadata"], sample["reward_extras"]) == ({"answer": "4"}, '{"is_success":true}')


@check("Reward.step_reward_arr")
async def _(_folder: Path) -> None:
    async with agent("A1", "A22") as a:
        await two_turns(a)
        (timeline,) = await a.timelines()
        await post(a, "/reward", {"score": 0.5, "turn": 1})
        await post(a, "/reward", {"score": 0.25, "call": timeline["calls"][1]})
        (sample,) = (await a.get("/samples"))["samples"]
        texts = [
            (reward["score"], text_of(a, sample["response_ids"][reward["start"] : reward["end"]]))
            for reward in sample["rewards"]
        ]
        assert texts == [(0.5, "A1"), (0.25, "A22")]


@check("agent_name")
async def _(_folder: Path) -> None:
    async with agent("A1", "A2") as a:
        await a.ask_text("p", headers={"x-branchline-agent": "planner"})
        url = f"{a.gateway.url}/sessions/{a.session.id}/agents/coder/v1/chat/completions"
        body = {"model": "toy", "messages": [{"role": "user", "content": "p"}]}
        assert (await a.http.post(url, json=body, headers=a.api_headers)).status_code == 200
        assert {timeline["agent"] for timeline in await a.timelines()} == {"planner", "coder"}


@check("task_id")
async def _(_folder: Path) -> None:
    async with agent("A1", group="task-7") as a:
        await a.gateway.session(group="task-7")
        found = await a.http.get(f"{a.gateway.url}/sessions?group=task-7", headers=a.admin_headers)
        assert len(found.json()["sessions"]) == 2


@check("temperature")
async def _(_folder: Path) -> None:
    async with agent("A1", sampling={"temperature": 0.9, "top_p": 0.5, "top_k": 3}) as a:
        await a.ask_text("p", temperature=0.1)
        sampling = a.session.managed.session.tree.calls[0].sampling
        assert [sampling[name] for name in ("temperature", "top_p", "top_k")] == [0.9, 0.5, 3]


@check("max_response_length_in_one_turn")
async def _(_folder: Path) -> None:
    async with agent("a long answer", sampling={"max_tokens": 4}) as a:
        assert await a.ask_text("p", max_tokens=100) == "a lo"


@check("max_steps")
async def _(_folder: Path) -> None:
    async with agent("A1", limits={"calls": 1}) as a:
        await a.ask_text("p")
        assert (await a.ask("p")).status_code == 409


@check("val_kwargs")
async def _(_folder: Path) -> None:
    async with agent("A1", eval=True, sampling={"temperature": 0.0}) as a:
        await a.ask_text("p")
        body = await a.get("/samples?include_aborted=true")
        assert body["samples"] == []
        assert [entry["reason"] for entry in body["report"]["dropped"]] == ["evaluation"]


# -- samples -----------------------------------------------------------------------------------------


@check("max_sample_per_task")
async def _(_folder: Path) -> None:
    async with agent("A1", "A2", "A3") as a:
        for _ in range(3):
            await a.ask_text("p")
        body = await a.get("/samples?max_samples=2")
        texts = [text_of(a, sample["response_ids"]) for sample in body["samples"]]
        assert texts == ["A2", "A3"]
        assert [entry["reason"] for entry in body["report"]["dropped"]] == ["capped"]


@check("max_response_length")
async def _(_folder: Path) -> None:
    async with agent("a long answer") as a:
        await a.ask_text("p")
        (whole,) = (await a.get("/samples"))["samples"]
        limit = len(whole["prompt_ids"]) + 4
        body = await a.get(f"/samples?max_tokens={limit}")
        assert text_of(a, body["samples"][0]["response_ids"]) == "a lo"
        assert [entry["reason"] for entry in body["report"]["dropped"]] == ["over_length"]


@check("input_ids")
async def _(_folder: Path) -> None:
    async with agent("A1") as a:
        await a.ask_text("p")
        (sample,) = (await a.get("/samples"))["samples"]
        assert sample["prompt_ids"] + sample["response_ids"] == (await a.timelines())[0]["ids"]


@check("loss_mask")
async def _(_folder: Path) -> None:
    async with agent("A1", "A2", "A3") as a:
        await two_turns(a)
        await a.ask_text("p", "A1", "r")
        samples = (await a.get("/samples"))["samples"]
        (mask, _) = [[0] * len(s["prompt_ids"]) + s["response_mask"] for s in samples]
        assert mask == (await a.timelines())[0]["mask"]
        assert [sample["shares"][0] for sample in samples] == [0.5, 0.5]


@check("logprobs")
async def _(_folder: Path) -> None:
    async with agent("A1", "A2") as a:
        await two_turns(a)
        (sample,) = (await a.get("/samples"))["samples"]
        context = [
            logprob
            for logprob, mask in zip(sample["response_logprobs"], sample["response_mask"], strict=True)
            if not mask
        ]
        assert set(context) == {0.0}
    async with agent(engine=WithoutLogprobs(ToyCodec(), replies("A1"))) as a:
        await a.ask_text("p")
        (sample,) = (await a.get("/samples"))["samples"]
        assert sample["response_logprobs"] == [None, None]
        (sample,) = (await a.get("/samples?missing_logprob=0"))["samples"]
        assert sample["response_logprobs"] == [0.0, 0.0]


@check("author")
async def _(_folder: Path) -> None:
    async with agent("A1", "A2") as a:
        await two_turns(a)
        assert (await a.timelines())[0]["authors"] == ["env", "llm", "env", "llm"]


@check("author: llm(do_not_train)")
async def _(_folder: Path) -> None:
    async with agent("A1") as plain:
        rule = RoutingRule.parse("agent=judge,train=no")
        async with agent("A1", engine=plain.engine, gateway_engine=Router(plain.engine, rules=[rule])) as a:
            await a.ask_text("p", headers={"x-branchline-agent": "judge"})
            body = await a.get("/samples")
            assert [entry["reason"] for entry in body["report"]["dropped"]] == ["untrained"]


@check("token_arr")
async def _(_folder: Path) -> None:
    async with agent("A1", "A2") as a:
        await two_turns(a)
        (timeline,) = await a.timelines()
        texts = [text_of(a, timeline["ids"][start:end]) for start, end in timeline["spans"]]
        assert texts == ["user:p\n", "assistant:A1", "user:q\n", "assistant:A2"]
