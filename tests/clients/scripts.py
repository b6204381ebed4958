"""The model's replies to each client: tool calls, two helpers if the client has sub-agents, and a second
request that continues the first."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from branchline.core.message import Message, ToolCall
from tests.clients.prompt_readers import Prompt

HELPERS = ("one", "two")
TASKS = {who: f"TASK {who}: write the word {who} into {who}.txt and report." for who in HELPERS}
TITLE = "A note and two words"

ScriptedReply = Message | Callable[[Prompt], Message]


def call(name: str, **arguments: Any) -> ToolCall:
    return ToolCall(name, json.dumps(arguments))


def reply(text: str, *calls: ToolCall) -> Message:
    return Message("assistant", text, tool_calls=calls)


def reply_with_reasoning(reasoning: str, text: str, *calls: ToolCall) -> Message:
    return Message("assistant", text, reasoning_content=reasoning, tool_calls=calls)


@dataclass(frozen=True)
class Script:
    """The replies for one client."""

    main: Sequence[ScriptedReply]
    write: Callable[[str], ToolCall] | None = None
    """The call with which a helper writes its word; None if the client has no sub-agents."""
    helpers_overlap: bool = False
    """The client runs both helpers concurrently."""
    turn_after_helpers: int = -1
    """The main agent's turn that must find the helpers' work done."""
    released_by_turn: Mapping[str, int] = field(default_factory=dict)
    """Helpers that do not reply before this turn of the main agent."""
    has_reasoning: bool = False

    def agent_of(self, prompt: Prompt) -> str:
        """The agent that a prompt belongs to; `aside` for requests without tools."""
        if not prompt.has_tools:
            return "aside"
        return next((who for who in HELPERS if prompt.asks_for(TASKS[who])), "main")

    def helper(self, who: str) -> list[Message]:
        assert self.write is not None
        return [reply("", self.write(who)), reply(f"The word {who} is written.")]

    def reply(self, prompt: Prompt) -> Message:
        who = self.agent_of(prompt)
        if who == "aside":
            return reply(TITLE)
        lines: Sequence[ScriptedReply] = self.main if who == "main" else self.helper(who)
        line = lines[min(prompt.turn, len(lines) - 1)]
        message = line if isinstance(line, Message) else line(prompt)
        if not self.has_reasoning:
            return message
        return reply_with_reasoning(f"Turn {prompt.turn} of {who}.", message.content, *message.tool_calls)


FIRST_REQUEST = "Write a note, then let two helpers write a word each."
SECOND_REQUEST = "And look at the note once more."
FINAL_REPLIES = ("All done.", "Looked again.")
"""The last replies to the first and the second request."""


def claude_code(workspace: Path) -> Script:
    note = str(workspace / "note.txt")

    def helper(who: str) -> ToolCall:
        return call("Agent", description=f"Write {who}", prompt=TASKS[who], subagent_type="general-purpose")

    return Script(
        main=(
            reply("I write a note.", call("Bash", command="echo hi > note.txt", description="Write a note")),
            reply("", call("Read", file_path=note)),
            reply("Two helpers now.", *[helper(who) for who in HELPERS]),
            # Its client writes out `replace_all: false` when it shows this again.
            reply("", call("Edit", file_path=note, old_string="hi", new_string="ho")),
            reply(FINAL_REPLIES[0]),
            reply("", call("Bash", command="cat note.txt one.txt two.txt", description="Look")),
            reply(FINAL_REPLIES[1]),
        ),
        write=lambda who: call("Bash", command=f"echo {who} > {who}.txt", description="Write a word"),
        helpers_overlap=True,
        turn_after_helpers=3,
    )


def codex(workspace: Path) -> Script:
    def wait(prompt: Prompt) -> Message:
        ids = re.findall(r'"agent_id": ?"([^"]+)"', prompt.text)
        return reply("", call("multi_agent_v1__wait_agent", targets=ids, timeout_ms=20000))

    return Script(
        main=(
            reply(
                "I look and write.",
                call("exec_command", cmd="echo hi > note.txt"),
                call("exec_command", cmd="pwd"),
            ),
            reply("", *[call("multi_agent_v1__spawn_agent", message=TASKS[who]) for who in HELPERS]),
            wait,
            reply("", call("exec_command", cmd="cat one.txt two.txt")),
            reply(FINAL_REPLIES[0]),
            reply("", call("exec_command", cmd="cat note.txt")),
            reply(FINAL_REPLIES[1]),
        ),
        write=lambda who: call("exec_command", cmd=f"echo {who} > {who}.txt"),
        helpers_overlap=True,
        turn_after_helpers=3,
    )


def codex_code_mode(workspace: Path) -> Script:
    """Newer models of codex write programs into a freeform tool, one call at a time.

    A helper's report that arrives while the main agent is being sampled makes codex drop the rest of that
    answer, so each helper works while the main agent waits for it.
    """

    def shell(command: str) -> ToolCall:
        run = json.dumps({"cmd": command})
        return call("exec", input=f"const ran = await tools.exec_command({run});\ntext(ran.output);\n")

    def spawn(who: str) -> ToolCall:
        return call("collaboration__spawn_agent", task_name=who, message=TASKS[who], fork_turns="none")

    wait = call("collaboration__wait_agent", timeout_ms=20000)
    return Script(
        main=(
            reply("I write a note.", shell("echo hi > note.txt")),
            reply("", spawn("one")),
            reply("", wait),
            reply("", spawn("two")),
            reply("", wait),
            reply("", shell("cat one.txt two.txt")),
            reply(FINAL_REPLIES[0]),
            reply("", shell("cat note.txt")),
            reply(FINAL_REPLIES[1]),
        ),
        write=lambda who: shell(f"echo {who} > {who}.txt"),
        turn_after_helpers=5,
        released_by_turn={"one": 2, "two": 4},
    )


def qwen_code(workspace: Path) -> Script:
    note = str(workspace / "note.txt")

    def shell(command: str) -> ToolCall:
        return call("run_shell_command", command=command, is_background=False)

    def helper(who: str) -> ToolCall:
        return call("agent", description=f"Write {who}", prompt=TASKS[who], subagent_type="general-purpose")

    return Script(
        main=(
            reply("I write a note.", shell("echo hi > note.txt")),
            reply("", call("read_file", file_path=note), call("glob", pattern="*.txt")),
            reply("", call("edit", file_path=note, old_string="hi", new_string="ho")),
            reply("Two helpers now.", *[helper(who) for who in HELPERS]),
            reply(FINAL_REPLIES[0]),
            reply("", shell("cat note.txt one.txt two.txt")),
            reply(FINAL_REPLIES[1]),
        ),
        write=lambda who: shell(f"echo {who} > {who}.txt"),
        turn_after_helpers=4,
    )


def opencode(workspace: Path) -> Script:
    note = str(workspace / "note.txt")

    def shell(command: str) -> ToolCall:
        return call("bash", command=command, description="Run a command")

    def helper(who: str) -> ToolCall:
        return call("task", description=f"Write {who}", prompt=TASKS[who], subagent_type="general")

    return Script(
        main=(
            reply("I write a note.", shell("echo hi > note.txt")),
            reply("", call("read", filePath=note), shell("ls")),
            reply("", call("edit", filePath=note, oldString="hi", newString="ho")),
            reply("Two helpers now.", *[helper(who) for who in HELPERS]),
            reply(FINAL_REPLIES[0]),
            reply("", shell("cat note.txt one.txt two.txt")),
            reply(FINAL_REPLIES[1]),
        ),
        write=lambda who: shell(f"echo {who} > {who}.txt"),
        helpers_overlap=True,
        turn_after_helpers=4,
    )


def pi(workspace: Path) -> Script:
    return Script(
        main=(
            reply("I write a note.", call("bash", command="echo hi > note.txt")),
            reply("", call("read", path="note.txt"), call("bash", command="ls")),
            reply("", call("edit", path="note.txt", edits=[{"oldText": "hi", "newText": "ho"}])),
            reply("", call("bash", command="echo one > one.txt; echo two > two.txt")),
            reply(FINAL_REPLIES[0]),
            reply("", call("bash", command="cat note.txt")),
            reply(FINAL_REPLIES[1]),
        ),
    )
