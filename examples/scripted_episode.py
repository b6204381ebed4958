"""A scripted multi-agent episode recorded in one tree; `make example-tree` runs it.

A session gets the requests and outputs of best-of-3, a sub-agent, a repair loop, a compaction and an edit,
with a toy codec that uses bytes as tokens. Then the tree, its timelines, the cause of every fork and the
report of all sampled tokens are printed.
"""

from __future__ import annotations

import numpy as np
from rich.console import Console
from rich.table import Table

from branchline import (
    Generation,
    Message,
    Request,
    Session,
    ToolCall,
    ToyCodec,
    classify_forks,
    export_samples,
    timelines_of,
)
from branchline.cli.tree import render_tree
from branchline.timelines.diagnosis import diagnose

CODEC = ToyCodec.chatml()
TOOLS = tuple({"type": "function", "function": {"name": name}} for name in ("run", "agent"))


class Episode:
    """Runs scripted calls on a session."""

    def __init__(self) -> None:
        self.session = Session("demo", CODEC)

    def call(self, history: list[Message], *answers: Message | str, agent: str = "main") -> Message:
        turn = self.session.prepare(Request(tuple(history), TOOLS, agent=agent))
        messages = [Message("assistant", answer) if isinstance(answer, str) else answer for answer in answers]
        generations = []
        for message in messages:
            ids = CODEC.encode_reply(message)
            generations.append(Generation(ids, np.full(len(ids), -0.7, np.float32), 1, message=message))
        self.session.record_delivery(self.session.commit(turn, *generations).call)
        return messages[0]


def user(text: str) -> Message:
    return Message("user", text)


def run_episode(episode: Episode) -> None:
    """Runs the episode; each comment names what the tree will show."""
    history = [Message("system", "You fix programs."), user("The test suite fails. Find out why.")]

    # Best-of-3: one prompt, three answers; the agent continues the second.
    plan = "I will read the failing test first."
    episode.call(history, "Let me guess.", plan, "Run everything again.")
    history += [Message("assistant", plan), user("Good. Go on.")]

    # A sub-agent: a tool call contains a task, another agent works on it, its answer is the result.
    task = "Read tests/test_parse.py and say what it expects."
    spawn = Message("assistant", "", tool_calls=(ToolCall("agent", f'{{"task": "{task}"}}', "call_1"),))
    history.append(episode.call(history, spawn))
    helper = [Message("system", "You read files and report."), user(task)]
    look = Message(
        "assistant", "", tool_calls=(ToolCall("run", '{"cmd": "cat tests/test_parse.py"}', "call_2"),)
    )
    helper.append(episode.call(helper, look, agent="reader"))
    helper.append(Message("tool", "assert parse('1,5') == 1.5", tool_call_id="call_2"))
    found = episode.call(helper, "It expects a comma as decimal point.", agent="reader")
    history.append(Message("tool", found.content, tool_call_id="call_1"))

    # A repair loop: a bad call and its error are temporary context, then removed by the framework.
    bad = episode.call(history, Message("assistant", "run sed on parse.py"))
    error = user("That was no tool call. Call a tool.")
    good = Message(
        "assistant", "", tool_calls=(ToolCall("run", '{"cmd": "sed -i s/,/./ parse.py"}', "call_3"),)
    )
    episode.call([*history, bad, error], good)
    history += [good, Message("tool", "ok", tool_call_id="call_3")]
    history.append(episode.call(history, "Fixed: commas are read as points now."))

    # An edit: the user rewrites an earlier message and the agent continues from there.
    edited = [*history[:3], user("Good. Do not change any file, only explain.")]
    episode.call(edited, "The parser splits at commas before it reads numbers.")

    # A compaction: a summary is sampled, and a new conversation starts from it.
    history.append(user("Summarise what you did."))
    summary = episode.call(history, "The test wants decimal commas; parse.py now turns them into points.")
    episode.call(
        [history[0], user(f"Earlier: {summary.content} Now write the changelog.")], "Parse decimal commas."
    )


def main() -> None:
    episode = Episode()
    run_episode(episode)
    tree = episode.session.tree
    fork_report = classify_forks(tree)
    console = Console()
    console.rule("the tree")
    console.print(render_tree(tree, fork_report))
    console.rule("timelines")
    table = Table("agent", "messages", "tokens", "sampled", "outputs")
    for line in timelines_of(tree):
        outputs = " → ".join(
            node.message.content or node.message.tool_calls[0].name for node in line.sampled_nodes
        )
        table.add_row(line.agent, str(len(line.nodes)), str(len(line)), str(line.mask.sum()), outputs[:70])
    console.print(table)
    console.rule("forks")
    for fork in fork_report.forks:
        console.print(f"· {diagnose(tree, fork, CODEC.decode)}", markup=False, soft_wrap=True)
    export = export_samples(tree, session="demo")
    report = export.report
    shares = sum(float(sample.shares.sum()) for sample in export.samples)
    console.rule("samples")
    console.print(
        f"{report.samples} samples; {report.trained_tokens} of {report.sampled_tokens} sampled tokens "
        f"trained, shares sum to {shares:.1f}; {report.dropped_tokens} dropped; "
        f"all exact: {all(sample.exact for sample in export.samples)}"
    )


if __name__ == "__main__":
    main()
