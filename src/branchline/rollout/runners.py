"""Runners: what runs an agent on a task in a session. Each is a small value that can be sent elsewhere.

    FunctionRunner(run)                    async def run(task, session), or a plain function, or "module:name"
    CommandRunner("my-agent --once")       any program; it gets the session's URL and key as environment
    RemoteRunner("http://host/run")        a service that gets the task and the URL, and completes the session
    LoopRunner()                           the agents of the loop's registry, by the task's `agent_name`

A runner returns when the agent is done, or raises. What it returns, if anything, is the session's reward. An
agent needs only the session's URL and key, so it may run anywhere.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol, runtime_checkable
from urllib.parse import urlsplit

import msgspec

from branchline.core.errors import InputError
from branchline.core.reward import RewardData
from branchline.core.suggestions import did_you_mean, near_path
from branchline.engines.client import HttpClient, ServerConfig
from branchline.loop.agents import AgentContext, agent_names, find_agent, run_agent, select
from branchline.loop.context.context_options import ContextOptions
from branchline.loop.http_model import HttpModel
from branchline.loop.registry import InteractionRegistry, ToolRegistry, is_async_callable
from branchline.loop.state import LoopState
from branchline.loop.task import LoopLimits, Task
from branchline.loop.timeouts import run_in_thread
from branchline.loop.verl import VerlConfig, read_verl_file
from branchline.rollout.failures import own_place
from branchline.rollout.processes import run_command
from branchline.rollout.session_gateway import AgentSession
from branchline.rollout.session_result import EndCause, RunnerError
from branchline.rollout.task_variables import task_variables
from branchline.rollout.tasks import RolloutTask

RunnerFunction = Callable[[Any, AgentSession], Awaitable[RewardData | None] | RewardData | None]
_SECRET_PREFIX = "BRANCHLINE_"
"""Variables that hold keys of engines and of the gateway; agents do not get them."""
_SUBMIT_TIMEOUT_S = 60.0


@runtime_checkable
class Runner(Protocol):
    """Runs an agent on a task."""

    async def run(self, task: RolloutTask, session: AgentSession) -> RewardData | None:
        """Returns when the agent is done: its reward, or None if it has posted one or a reward function will
        give it."""
        ...


@dataclass(frozen=True)
class FunctionRunner:
    """Calls a function of (task, session); the task is the row. A plain function runs in a thread."""

    function: RunnerFunction | str

    def __post_init__(self) -> None:
        function = self._load()
        if not callable(function):
            raise InputError(f"agent: got {function!r}, expected a function of (task, session)")
        try:
            inspect.signature(function).bind("task", "session")
        except TypeError as error:
            raise InputError(f"agent: expected a function of (task, session), but {error}") from error

    async def run(self, task: RolloutTask, session: AgentSession) -> RewardData | None:
        function = self._load()
        if is_async_callable(function):
            value = function(task.row, session)
        else:
            value = await run_in_thread(function, task.row, session)
        return await value if inspect.isawaitable(value) else value

    def _load(self) -> RunnerFunction:
        if isinstance(self.function, str):
            function: RunnerFunction = load_object(self.function, "agent")
            return function
        return self.function


@dataclass(frozen=True)
class CommandRunner:
    """Runs a shell command; any exit code but 0 fails the session.

    It gets `OPENAI_BASE_URL`, `OPENAI_API_KEY`, `ANTHROPIC_BASE_URL`, `ANTHROPIC_API_KEY`, `BRANCHLINE_TASK`
    (the row as JSON), `BRANCHLINE_TASK_FILE` (a file with the same), `BRANCHLINE_PROMPT` (its prompt as text)
    and `BRANCHLINE_SESSION`. A row or a prompt that is too long for a variable is in the file only.
    """

    command: str
    log_folder: Path | None = None
    """Output goes to a file for each session in this folder."""

    def __post_init__(self) -> None:
        if not self.command.strip():
            raise InputError(f"command: got {self.command!r}, expected a shell command")

    async def run(self, task: RolloutTask, session: AgentSession) -> None:
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(_SECRET_PREFIX)},
            "OPENAI_BASE_URL": session.base_url,
            "OPENAI_API_KEY": session.api_key,
            "ANTHROPIC_BASE_URL": session.anthropic_base_url,
            "ANTHROPIC_API_KEY": session.api_key,
        }
        log_file = None if self.log_folder is None else self.log_folder / f"{session.id}.log"
        with task_variables(self.command, session.id, task, prompt=task.prompt) as variables:
            ended = await run_command(self.command, {**environment, **variables}, log_file=log_file)
        if ended.exit_code != 0:
            raise RunnerError(EndCause.EXIT_CODE, f"exit code {ended.exit_code}\n{ended.tail}")


@dataclass(frozen=True)
class RemoteRunner:
    """Sends the task and the session to a service, and waits until the session is completed.

    The service gets `{"task": …, "session": {"id", "base_url", "anthropic_base_url", "api_key"}}` and answers
    at once. Its agent marks the session as complete: `POST {anthropic_base_url}/complete` with the API key.
    """

    url: str
    api_key: str = ""

    def __post_init__(self) -> None:
        ServerConfig(self.url)

    async def run(self, task: RolloutTask, session: AgentSession) -> None:
        names = ("id", "base_url", "anthropic_base_url", "api_key")
        body = {"task": task.row, "session": {name: getattr(session, name) for name in names}}
        config = ServerConfig(self.url, api_key=self.api_key, read_timeout_s=_SUBMIT_TIMEOUT_S)
        parts = urlsplit(self.url)
        client = HttpClient(config, f"{parts.scheme}://{parts.netloc}")
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        try:
            response = client.request("POST", path, msgspec.json.encode(body))
            status, content = await response.read()
            await response.close()
        finally:
            await client.close()
        if status // 100 != 2:
            text = content[:200].decode(errors="replace")
            raise RunnerError(EndCause.RUNNER_ERROR, f"{self.url}: got status {status}, expected 2xx: {text}")
        await session.wait()


@dataclass(frozen=True)
class LoopRunner:
    """Runs the agents of the loop's registry: `single_turn`, `tool`, `state`, and those with @agent."""

    name: str = ""
    """The agent of tasks without an `agent_name`."""
    tools: ToolRegistry | None = None
    interactions: InteractionRegistry | None = None
    limits: LoopLimits | None = None
    config_file: str = ""
    """A YAML file of verl's with tools, an interaction and limits (`read_verl_file`), in place of `tools` and
    `interactions`. It is read once in each process, so its classes need not be sent to another one."""
    model_length: int | None = None
    """In place of that of the limits."""
    context_options: ContextOptions | None = None

    async def run(self, task: RolloutTask, session: AgentSession) -> None:
        tools, interactions, limits = self._settings()
        async with HttpModel(session.base_url, session.api_key, session.control_key) as model:
            context = AgentContext(model, tools, interactions, limits, context_options=self.context_options)
            await run_agent(LoopState.begin(self._read(task)), context)

    def check(self, task: RolloutTask) -> None:
        """Raises InputError for a task that names what is not there, and for a file that cannot be used."""
        tools, interactions, _ = self._settings()
        read = self._read(task)
        find_agent(read.agent_name)
        select(read, tools, interactions)

    def _read(self, task: RolloutTask) -> Task:
        return Task.read({**task.row, "agent_name": task.agent_name or self.name})

    def _settings(self) -> tuple[ToolRegistry | None, InteractionRegistry | None, LoopLimits | None]:
        tools, interactions, limits = self.tools, self.interactions, self.limits
        if self.config_file:
            config = _read_loop_file(self.config_file)
            tools, interactions, limits = config.tools, config.interactions, limits or config.limits
        if self.model_length is not None:
            limits = msgspec.structs.replace(limits or LoopLimits(), model_length=self.model_length)
        return tools, interactions, limits


@cache
def _read_loop_file(path: str) -> VerlConfig:
    _find_modules_here()
    return read_verl_file(path)


RunnerSpec = Runner | RunnerFunction | str


@dataclass(frozen=True)
class DispatchRunner:
    """Runs each task by the runner of its `agent_name`."""

    runners: Mapping[str, Runner]

    async def run(self, task: RolloutTask, session: AgentSession) -> RewardData | None:
        return await select_runner(self.runners, task.agent_name).run(task, session)


def make_runner(spec: RunnerSpec) -> Runner:
    """Returns a runner: one that is given, that of a function, or that of `module:function`. A name without
    a colon is an agent of the loop's registry."""
    if isinstance(spec, str) and ":" not in spec:
        if spec not in agent_names():
            names = ", ".join(agent_names())
            near = did_you_mean(spec, agent_names())
            raise InputError(f"agent: got {spec!r}, expected MODULE:FUNCTION, or one of {names}{near}")
        return LoopRunner(spec)
    if isinstance(spec, str):
        return FunctionRunner(spec)
    return spec if isinstance(spec, Runner) else FunctionRunner(spec)


def select_runner(runners: Mapping[str, Runner], agent_name: str) -> Runner:
    """Returns the runner of a task: by name, else an agent of the loop's registry.

    The runner with the empty name works on tasks without an `agent_name`. Raises InputError for an unknown
    name.
    """
    if agent_name in runners:
        return runners[agent_name]
    try:
        find_agent(agent_name)
    except InputError as error:
        known = [*sorted(name for name in runners if name), *agent_names()]
        near = did_you_mean(agent_name, known)
        raise InputError(f"agent_name: got {agent_name!r}, expected one of {known}{near}") from error
    return LoopRunner(agent_name)


def load_object(path: str, what: str) -> Any:
    """Returns what `module:name` names; modules of the working directory are found too.

    Raises InputError if there is none, or if importing the module fails.
    """
    module_name, separator, name = path.partition(":")
    if not separator or not module_name or not name:
        raise InputError(f"{what}: got {path!r}, expected MODULE:FUNCTION")
    _find_modules_here()
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:
        near = _near_module(module_name, name) if isinstance(error, ModuleNotFoundError) else ""
        raise InputError(
            f"{what}: got {path!r}, which cannot be loaded: {type(error).__name__}: {error}"
            f"{own_place(error)}{near}"
        ) from error
    for part in name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError as error:
            near = did_you_mean(part, [one for one in dir(found) if callable(getattr(found, one, None))])
            raise InputError(
                f"{what}: got {path!r}, which cannot be loaded: {module_name} has no {part}{near}"
            ) from error
    return found


def _near_module(module: str, name: str) -> str:
    """`; did you mean …?` with a module of the working directory whose name is like one that does not exist,
    also one that is written as its file."""
    file = Path(module if module.endswith(".py") else f"{module.replace('.', '/')}.py")
    near = near_path(file)
    if near is None or near.suffix != ".py" or near.is_absolute():
        return ""
    return f"; did you mean {'.'.join(near.with_suffix('').parts)}:{name}?"


def _find_modules_here() -> None:
    """Lets modules of the working directory be imported."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
