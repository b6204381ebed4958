"""Real command-line agents against a real gateway: what they do to their history, and the resulting tree.
`make test-clients` installs them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from branchline.core.call import Delivery
from branchline.timelines.causes import Cause
from tests.clients.episodes import Episode, run_episode
from tests.clients.programs import PROGRAMS
from tests.clients.scripts import FINAL_REPLIES, HELPERS, TASKS, Script
from tests.clients.table import comparable, guide_rows, parse_table, render_table

CODECS = ("toy", "qwen3")
NAMES = tuple(PROGRAMS)
ALONE = ("pi",)
"""Clients without sub-agents."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("node") is None, reason="needs node: the clients are programs of npm"),
    pytest.mark.skipif(
        not all(program.package.executable.exists() for program in PROGRAMS.values()),
        reason="needs the clients: make test-clients",
    ),
]


def script(name: str) -> Script:
    return PROGRAMS[name].script(Path("work"))


@pytest.fixture(params=CODECS)
def codec(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=NAMES)
def episode(request: pytest.FixtureRequest, codec: str) -> Episode:
    return run_episode(request.param, codec)


def test_client_did_its_work_with_its_own_tools(episode: Episode) -> None:
    first, second = episode.stdout
    assert FINAL_REPLIES[0] in first
    assert FINAL_REPLIES[1] in second
    written = {"one": "one", "two": "two"}
    assert episode.notes.items() >= written.items()
    assert episode.notes["note"] in ("hi", "ho")
    # No call was repeated or cancelled.
    assert all(episode.tree.delivery(call) == Delivery.DELIVERED for call in episode.tree.calls)


def test_every_call_is_a_path_of_the_ids_exchanged(episode: Episode) -> None:
    tree = episode.tree
    paths = [tree.path_ids(tree.nodes[output]).tolist() for call in tree.calls for output in call.outputs]
    assert sorted(paths) == sorted([one.prompt + one.ids for one in episode.generations])


def test_every_sampled_token_is_trained(episode: Episode) -> None:
    export = episode.export
    assert export.report.sampled_tokens == sum(len(one.ids) for one in episode.generations)
    assert export.report.trained_tokens == export.report.sampled_tokens
    assert not export.report.dropped
    shares = sum(float(sample.shares.sum()) for sample in export.samples)
    assert shares == pytest.approx(export.report.sampled_tokens)
    assert all(sample.exact for sample in export.samples)


def test_sub_agents_have_an_edge_to_the_call_that_spawned_them(episode: Episode) -> None:
    tree, report = episode.tree, episode.fork_report
    helpers = [fork for fork in report.forks if fork.cause == Cause.SUB_AGENT]
    edges = {edge.target.id: edge.source for edge in report.edges if edge.cause == Cause.SUB_AGENT}
    if episode.program.name in ALONE:
        assert not helpers
        return
    assert len(helpers) == len(HELPERS)
    for fork in helpers:
        sent = " ".join([made.arguments for made in edges[fork.branch.id].message.tool_calls])
        history = "\n".join([node.message.content for node in tree.nodes[fork.call.prompt_node].path()])
        assert any(task in history and task in sent for task in TASKS.values())
    assert report.main_leaf is not None
    assert report.main_leaf.message.content == FINAL_REPLIES[1]


def test_appending_agent_is_one_timeline(episode: Episode) -> None:
    (main,) = [line for line in episode.timelines if line.leaf.message.content == FINAL_REPLIES[1]]
    rewritten = [diagnosis for diagnosis in episode.diagnoses if diagnosis.edit_description]
    turns = len(script(episode.program.name).main)
    if episode.program.name == "qwen-code":
        # It rewrites its first message at every start, because the folder has other files then.
        (diagnosis,) = rewritten
        assert diagnosis.cause == Cause.EDIT
        assert diagnosis.edit_description.startswith("message 2 (user), text: ")
        assert "note.txt" in diagnosis.edit_description
        turns = 2
    else:
        assert not rewritten
    assert len(main.calls) == turns


def test_titles_and_topic_checks_are_side_calls(episode: Episode) -> None:
    aside = [one for one in episode.generations if one.agent == "aside"]
    labelled = [fork for fork in episode.fork_report.forks if fork.cause == Cause.SIDE_CALL]
    assert len(labelled) == len(aside)
    assert bool(aside) == (episode.program.name == "opencode")


@pytest.mark.parametrize("name", [name for name in NAMES if script(name).helpers_overlap])
def test_sub_agents_run_concurrently(name: str, codec: str) -> None:
    turns = [(one.agent, one.turn) for one in run_episode(name, codec).generations if one.agent in HELPERS]
    assert {who for who, _ in turns[:2]} == set(HELPERS)
    assert [turn for _, turn in turns[:2]] == [0, 0]


def test_table_of_the_guide_matches_the_runs() -> None:
    table = render_table([run_episode(name, codec).row for codec in CODECS for name in NAMES])
    print("\n" + table)
    assert [comparable(row) for row in guide_rows()] == [comparable(row) for row in parse_table(table)]
