"""Options of the commands that run agents on tasks: `run` and `train`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from branchline.core.choices import CompactionName
from branchline.core.errors import InputError
from branchline.core.option_fields import group, option
from branchline.core.suggestions import did_you_mean_path
from branchline.loop.context.context_options import ContextOptions

if TYPE_CHECKING:  # imported late below: they need packages of the `serve` extra
    from branchline.rollout.judge import RelativeJudge
    from branchline.rollout.rewards import RewardFunction, VerifierCommand
    from branchline.rollout.runners import Runner
    from branchline.rollout.tasks import RolloutTask

JUDGE_KEY_ENV = "BRANCHLINE_JUDGE_KEY"
AGENT_HELP = """\
TASKS is a JSONL or Parquet file, or a Hugging Face dataset as NAME:SPLIT. A row is an object; `id` names it
and `agent_name` selects an agent. All other fields are for the agent and the reward.

An agent is one of:
  --agent module:function     async def function(task, session): task is the row; session has base_url,
                              api_key, anthropic_base_url and id. It may return the reward.
  --agent NAME=module:function   for the tasks whose agent_name is NAME; repeatable
  --agent NAME                an agent of the loop: single_turn, tool, state (edits its context). --tools FILE
                              has its tools, for example {tools: [{class_name: my_tools.Search}]}
  --command "shell command"   any program. It gets OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL,
                              ANTHROPIC_API_KEY, BRANCHLINE_TASK (the row as JSON), BRANCHLINE_TASK_FILE (a
                              file with the same, for rows over 128 KiB or `< "$BRANCHLINE_TASK_FILE"`),
                              BRANCHLINE_PROMPT (the text of the last user message) and BRANCHLINE_SESSION.
                              Any exit code but 0 fails the session.
  --agent-url URL             a service that gets the task and the session, and completes the session:
                              POST {anthropic_base_url}/complete

A reward is a number, true (1) or false (0), an object with a score, or a list of such objects. An object may
name a turn, call, timeline, tool or agent that it is for. It comes from one of:
  the agent                   what it returns, or posts with session.reward(…)
  --reward module:function    def function(task, trajectory), or async; trajectory.answer is the last answer
  --reward-command "command"  gets BRANCHLINE_TASK, BRANCHLINE_TASK_FILE and, on stdin, the session's line;
                              prints the reward as JSON in its last line on stdout and ends with status 0.
                              With --reward-exit-code the status is the reward: 0 is 1, 1 is 0, else an error
"""
"""What `run` and `train` say of tasks, agents and rewards in their help."""


@dataclass(frozen=True)
class AgentOptions:
    """The tasks, the agents and the rewards."""

    tasks: str = option(positional=True, metavar="TASKS")
    """A JSONL or Parquet file, or a Hugging Face dataset: NAME:SPLIT."""
    agent: tuple[str, ...] = option((), basic=True, metavar="MODULE:FUNCTION")
    """A function of (task, session); or NAME=MODULE:FUNCTION, or an agent of the loop."""
    command: str | None = option(None, basic=True, metavar="COMMAND")
    """A shell command that runs the agent."""
    agent_url: str | None = option(None, basic=True, metavar="URL")
    """A service that runs the agent."""
    tools: Path | None = option(None, basic=True, metavar="FILE")
    """Tools of agents of the loop: verl's YAML. It may also have the options of verl's `multi_turn`, such as
    max_assistant_turns and interaction_config_path."""
    model_length: int | None = None
    """Tokens of a prompt and its answer together, at which an agent of the loop ends."""
    reward: str | None = option(None, basic=True, metavar="MODULE:FUNCTION")
    """A function of (task, trajectory)."""
    reward_command: str | None = option(None, basic=True, metavar="COMMAND")
    """A shell command that verifies a session."""
    reward_exit_code: bool = option(False, needs={"reward_command": ()})
    """The exit status of --reward-command is the reward, as of a test runner: 0 is 1, 1 is 0."""
    compaction: CompactionName | None = option(None, needs={"model_length": ()})
    """How the agent state shortens a context that is too long; by default its trajectory ends."""
    context: ContextOptions = group(ContextOptions, "context of the agent state")

    @property
    def has_loop_options(self) -> bool:
        """Whether there is an option for agents of the loop."""
        return self.tools is not None or self.model_length is not None


@dataclass(frozen=True)
class JudgeOptions:
    """A model that scores the sessions of a task relative to each other."""

    judge_url: str | None = option(None, metavar="URL")
    """An OpenAI-compatible server, with /v1; its key is read from BRANCHLINE_JUDGE_KEY."""
    judge_model: str | None = option(None, metavar="NAME", needs={"judge_url": ()})
    """The model that judges."""
    judge_rubric: Path | None = option(None, metavar="FILE", needs={"judge_url": ()})
    """A text that says what is good."""


def build_runners(
    options: AgentOptions, tasks: Sequence[RolloutTask], log_folder: Path | None = None
) -> dict[str, Runner]:
    """Returns the agents by name; that of the empty name is for tasks without one. Raises InputError for two
    agents of one name, for none, and for options that none of them has."""
    from branchline.loop.agents import STATE_AGENT_NAME, agent_names
    from branchline.rollout.runners import CommandRunner, LoopRunner, RemoteRunner, make_runner

    runners: dict[str, Runner] = {}

    def add(name: str, runner: Runner) -> None:
        if name in runners:
            what = f"--agent: got {name!r} twice" if name else "--agent, --command, --agent-url: got several"
            raise InputError(f"{what}, expected one; name others: --agent NAME=MODULE:FUNCTION")
        runners[name] = runner

    def make(spec: str) -> Runner:
        runner = make_runner(spec)
        return _loop_runner(options, spec) if isinstance(runner, LoopRunner) else runner

    for text in options.agent:
        name, separator, path = text.partition("=")
        if not (path if separator else text):
            raise InputError(f"agent: got {text!r}, expected MODULE:FUNCTION, or NAME=MODULE:FUNCTION")
        add(name if separator else "", make(path if separator else text))
    if options.command is not None:
        add("", CommandRunner(options.command, log_folder))
    if options.agent_url is not None:
        add("", RemoteRunner(options.agent_url))
    for name in dict.fromkeys(task.agent_name for task in tasks if options.has_loop_options):
        if name and name not in runners and name in agent_names():
            runners[name] = _loop_runner(options, name)
    if not runners:
        raise InputError("agent: got none, expected --agent MODULE:FUNCTION, --command or --agent-url")
    loops = [one for one in runners.values() if isinstance(one, LoopRunner)]
    if options.has_loop_options and not loops:
        flag = "--model-length" if options.tools is None else "--tools"
        raise InputError(
            f"{flag}: expected it with an agent of the loop only: --agent tool, or the agent_name of tasks"
        )
    for runner in loops:
        if runner.context_options is not None and all(one.name != STATE_AGENT_NAME for one in loops):
            raise InputError("--compaction, --response-room, …: expected them with the agent state only")
    return runners


def _loop_runner(options: AgentOptions, name: str) -> Runner:
    from branchline.rollout.runners import LoopRunner

    context = options.context
    if options.compaction is not None:
        from branchline.runtime.compaction import make_policy

        context = replace(context, compaction=make_policy(options.compaction))
    return LoopRunner(
        name,
        config_file="" if options.tools is None else str(options.tools),
        model_length=options.model_length,
        context_options=None if context == ContextOptions() else context,
    )


def check_tasks(runners: Mapping[str, Runner], tasks: Sequence[RolloutTask], what: str = "tasks") -> None:
    """Raises InputError for an agent, a tool or an interaction that is unknown, before a model is loaded."""
    from branchline.rollout.runners import LoopRunner, select_runner

    for index, task in enumerate(tasks):
        try:
            runner = select_runner(runners, task.agent_name)
            if isinstance(runner, LoopRunner):
                runner.check(task)
        except InputError as error:
            raise InputError(f"{what}[{index}].{error}") from error


def build_reward(options: AgentOptions) -> RewardFunction | VerifierCommand | None:
    """Returns the reward function or command, or None."""
    from branchline.rollout.rewards import VerifierCommand, check_reward_function
    from branchline.rollout.runners import load_object

    if options.reward and options.reward_command:
        raise InputError("--reward, --reward-command: got both, expected one of them")
    if options.reward_command:
        return VerifierCommand(options.reward_command, options.reward_exit_code)
    if not options.reward:
        return None
    function: RewardFunction = load_object(options.reward, "reward")
    check_reward_function(function)
    return function


def build_judge(options: JudgeOptions) -> RelativeJudge | None:
    from branchline.rollout.judge import ChatEndpoint, RelativeJudge
    from branchline.rollout.judge_prompt import DEFAULT_RUBRIC

    if not options.judge_url:
        return None
    if not options.judge_model:
        raise InputError("--judge-model: got none, expected the name of the judge's model")
    rubric = DEFAULT_RUBRIC if options.judge_rubric is None else _read_rubric(options.judge_rubric)
    key = os.environ.get(JUDGE_KEY_ENV, "")
    return RelativeJudge(ChatEndpoint(options.judge_url, options.judge_model, key), rubric)


def _read_rubric(file: Path) -> str:
    try:
        return file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or "it is not UTF-8"
        near = did_you_mean_path(file)
        raise InputError(f"--judge-rubric: got {file}, expected a text file ({reason}){near}") from error
