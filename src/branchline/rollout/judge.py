"""A judge that scores the trajectories of a group relative to each other, with an LLM.

The judge is shown every history of every trajectory (`rollout/judge_prompt.py`). Equal trajectories are shown
once and get one score, and the order of what is shown follows from the content, as do their ids with the
judge's secret. So shuffling or duplicating a group changes neither the request nor, with a deterministic
judge, the scores.

Its answer is read by `rollout/judge_scores.py`. One that is not understood is asked for again, with what is
wrong with it, `attempts` times at most. A judge that fails leaves its group without scores; it never raises.

    judge = RelativeJudge(ChatEndpoint("http://127.0.0.1:8000/v1", "Qwen/Qwen3-32B"))
    judgements = await judge.score_group(task, trajectories)  # a score from 0 to 1, or why there is none

A function of `(task, trajectories)` that returns a score for each trajectory is a judge too.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import json
import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from branchline.core.errors import EngineError, InputError
from branchline.core.reader import replace_surrogates
from branchline.engines.client import HttpClient, ServerConfig
from branchline.engines.error_responses import error_from_response
from branchline.export.trajectory import Trajectory
from branchline.loop.registry import is_async_callable
from branchline.loop.timeouts import describe_error, run_in_thread, with_timeout
from branchline.rollout.failures import describe_traceback, own_place
from branchline.rollout.judge_prompt import DEFAULT_RUBRIC, describe_group, instructions, trajectory_digest
from branchline.rollout.judge_scores import Judgement, read_judgement, read_scores

log = logging.getLogger("branchline.rollout")

ChatMessages = Sequence[Mapping[str, str]]
Complete = Callable[[ChatMessages], str | Awaitable[str]]
"""Returns the answer of the judge's model to a conversation."""
Scores = Sequence[float | None] | Sequence[Judgement]
JudgeFunction = Callable[[Any, Sequence[Trajectory]], Scores | Awaitable[Scores]]
"""Returns the scores of the trajectories of a task, from 0 to 1 or true and false, in their order."""
_MAX_ECHO_CHARS = 20_000
_GRACE_S = 1.0


@dataclass
class ChatEndpoint:
    """A model at any OpenAI-compatible server."""

    url: str
    """Ends in `/v1`."""
    model: str
    api_key: str = field(default="", repr=False)
    timeout_s: float = 300.0
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"temperature": 0})
    """Further fields of the request."""
    _client: HttpClient | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        ServerConfig(self.url)

    async def __call__(self, messages: ChatMessages) -> str:
        if self._client is None:
            config = ServerConfig(self.url, api_key=self.api_key, read_timeout_s=self.timeout_s)
            self._client = HttpClient(config, self.url.rstrip("/"))
        body = {**self.parameters, "model": self.model, "messages": list(messages)}
        response = self._client.request("POST", "/chat/completions", msgspec.json.encode(body))
        try:
            status, content = await response.read()
        finally:
            await response.close()
        if status != 200:
            raise error_from_response(self._client.host_port, status, content)
        try:
            text = json.loads(content)["choices"][0]["message"]["content"]
        except (ValueError, LookupError, TypeError) as error:
            raise EngineError(f"{self.url}: got {content[:200]!r}, expected a chat completion") from error
        if not isinstance(text, str):
            raise EngineError(f"{self.url}: content: got {text!r:.100}, expected the text of an answer")
        return text

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()
            self._client = None


@dataclass
class RelativeJudge:
    """Scores groups by asking a model."""

    complete: Complete
    rubric: str = DEFAULT_RUBRIC
    attempts: int = 3
    """How often the model is asked for one group."""
    workers: int = 8
    """Groups that are judged at the same time."""
    timeout_s: float = 600.0
    """Time limit of one answer."""
    secret: bytes = field(default_factory=lambda: secrets.token_bytes(16), repr=False)
    """The ids of trajectories follow from it; agents must not know it."""
    _slots: asyncio.Semaphore | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not callable(self.complete):
            raise InputError(
                f"complete: got {self.complete!r}, expected a ChatEndpoint or a function of messages"
            )
        if not isinstance(self.secret, bytes) or not self.secret:
            raise InputError(f"secret: got {type(self.secret).__name__}, expected bytes, at least one")
        for name, value in (("attempts", self.attempts), ("workers", self.workers)):
            if value < 1:
                raise InputError(f"{name}: got {value}, expected 1 or more")

    async def score_group(self, task: object, trajectories: Sequence[Trajectory]) -> list[Judgement]:
        """Returns the score of each trajectory, from 0 to 1, or why the judge gave none."""
        if not trajectories:
            return []
        digests, ids, question = await asyncio.to_thread(_pose_question, task, trajectories, self.secret)
        self._slots = self._slots or asyncio.Semaphore(self.workers)
        async with self._slots:
            judgements = await self._ask(question, ids)
        by_digest = dict(zip(sorted(set(digests)), judgements, strict=True))
        return [by_digest[digest] for digest in digests]

    async def _ask(self, question: str, ids: Sequence[str]) -> list[Judgement]:
        """Asks until every trajectory has a score; else returns the answer with the most scores."""
        messages: list[dict[str, str]] = [
            {"role": "system", "content": instructions(self.rubric)},
            {"role": "user", "content": question},
        ]
        best: list[Judgement] = []
        for attempt in range(1, self.attempts + 1):
            answer: object = None
            try:
                # A copy: what the function does to its messages must not change the next attempt.
                answer = await with_timeout(
                    _call(self.complete, copy.deepcopy(messages)), self.timeout_s, _GRACE_S
                )
            except Exception as error:
                problem = _describe(error)
                judgements = [Judgement(None, problem)] * len(ids)
            else:
                judgements, problem = await asyncio.to_thread(read_scores, answer, ids)
            if not best or _count_scores(judgements) > _count_scores(best):
                best = judgements
            problem = problem or _invalid_scores(judgements, ids)
            if not problem:
                return judgements
            log.warning("judge: attempt %d of %d: %s", attempt, self.attempts, problem)
            if isinstance(answer, str):
                again = (
                    f"This answer cannot be used: {problem}. "
                    f"Answer again with the whole JSON object. The ids are {', '.join(ids)}."
                )
                messages[2:] = [
                    {"role": "assistant", "content": answer[:_MAX_ECHO_CHARS]},
                    {"role": "user", "content": again},
                ]
        asked = f" (asked {self.attempts} times)" if self.attempts > 1 else ""
        return [one if one.score is not None else Judgement(None, one.problem + asked) for one in best]


Judge = RelativeJudge | JudgeFunction


def check_judge(judge: object) -> None:
    """Raises InputError for what is no judge."""
    if isinstance(judge, RelativeJudge):
        return
    expected = "expected a RelativeJudge or a function of (task, trajectories)"
    if not callable(judge):
        raise InputError(f"judge: got {judge!r}, {expected}")
    try:
        inspect.signature(judge).bind("task", "trajectories")
    except TypeError as error:
        raise InputError(f"judge: {expected}, but {error}") from error
    except ValueError:  # a builtin without a signature
        pass


async def judge_group(
    judge: Judge, task: object, trajectories: Sequence[Trajectory], timeout_s: float | None = None
) -> list[Judgement]:
    """Returns what a judge says about each trajectory of a task; raises nothing because of the judge.

    It gets copies of its own. `timeout_s` limits a function; a RelativeJudge has limits of its own.
    """
    if not trajectories:
        return []
    is_relative = isinstance(judge, RelativeJudge)
    function = judge.score_group if isinstance(judge, RelativeJudge) else judge
    try:
        copied, own = await asyncio.to_thread(copy.deepcopy, (task, list(trajectories)))
        scores = await with_timeout(
            _call(function, copied, own), None if is_relative else timeout_s, _GRACE_S
        )
        return _check_scores(scores, len(trajectories))
    except Exception as error:
        problem = _describe(error) + own_place(error)
        log.warning("judge: %s", problem)
        return [Judgement(None, problem, describe_traceback(error))] * len(trajectories)


def _describe(error: Exception) -> str:
    return replace_surrogates(f"{type(error).__name__}: {describe_error(error)}")


async def _call(function: Callable[..., object], *arguments: object) -> object:
    if is_async_callable(function):
        value = function(*arguments)
    else:
        value = await run_in_thread(function, *arguments)
    return await value if inspect.isawaitable(value) else value


def _check_scores(scores: object, count: int) -> list[Judgement]:
    if hasattr(scores, "tolist"):  # a numpy array
        scores = scores.tolist()
    if not isinstance(scores, list | tuple) or len(scores) != count:
        got = f"{len(scores)} scores" if isinstance(scores, list | tuple) else type(scores).__name__
        raise InputError(f"got {got}, expected a list of {count} scores")
    return [_check_score(score) for score in scores]


def _check_score(score: object) -> Judgement:
    if isinstance(score, Judgement):
        return score if score.score is None and score.problem else read_judgement([score.score])
    if isinstance(score, np.generic):
        score = score.item()
    return read_judgement([float(score) if isinstance(score, bool) else score])


def _pose_question(
    task: object, trajectories: Sequence[Trajectory], secret: bytes
) -> tuple[list[str], list[str], str]:
    """Returns the digest of each trajectory, the ids of the different ones, and what the judge is shown."""
    digests = [trajectory_digest(trajectory) for trajectory in trajectories]
    distinct = dict(zip(digests, trajectories, strict=True))
    return digests, *describe_group(task, [distinct[digest] for digest in sorted(distinct)], secret)


def _count_scores(judgements: Sequence[Judgement]) -> int:
    return sum(judgement.score is not None for judgement in judgements)


def _invalid_scores(judgements: Sequence[Judgement], ids: Sequence[str]) -> str:
    return "; ".join(
        f"trajectory {name}: {judgement.problem}"
        for name, judgement in zip(ids, judgements, strict=True)
        if judgement.problem
    )
