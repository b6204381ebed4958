"""A trajectory and its session: where its calls are recorded, and which results it sends at the end.

A state that was interrupted resumes only in a session that has all its calls: in any other, the tokens of the
missing calls would be context that is never trained. At the end the session gets the rewards, so that its
samples carry them, and its new state.
"""

from __future__ import annotations

import logging
from typing import Any

from branchline.core.errors import InputError
from branchline.core.reward import Reward, make_reward
from branchline.loop.model import SessionControl
from branchline.loop.state import LoopState
from branchline.loop.timeouts import finish_despite_cancel

log = logging.getLogger("branchline.loop")


async def bind_session(state: LoopState, session: SessionControl) -> None:
    """Writes the session's id and address to the state. Raises InputError if it lacks a call of the state."""
    session_id = session.session_id
    if state.call_ids:
        info = await session.read_session()
        session_id, known = info.id, set(info.call_ids)
        for call_id in state.call_ids:
            if call_id not in known:
                where = f" at {state.session_url}" if state.session_url else ""
                raise InputError(
                    f"state.call_ids: got {call_id!r}, which session {info.id} does not have, "
                    f"expected the session of the trajectory, {state.session_id or 'unknown'}{where}"
                )
    state.session_id, state.session_url = session_id, session.base_url


async def report_results(state: LoopState, session: SessionControl) -> None:
    """Posts the rewards of a finished trajectory and ends its session, once.

    The session is aborted if the trajectory is not training data, else completed. Without a control key
    nothing is posted. A report that fails is repeated by the next run; rewards carry ids and count once.
    """
    if state.is_reported or not session.can_control:
        return
    await finish_despite_cancel(_report(state, session))
    state.is_reported = True


async def _report(state: LoopState, session: SessionControl) -> None:
    rewards = session_rewards(state)
    if rewards:
        await session.reward(rewards)
    reason = str(state.stop_reason or "")
    if state.is_excluded:
        await session.abort(f"{reason}: {state.stop_detail}" if state.stop_detail else reason)
    else:
        await session.complete(reason)


def session_rewards(state: LoopState) -> list[Reward]:
    """The rewards of a trajectory as its session stores them: of tool calls, turns and tools, then the whole.

    The extras of the last have the rewards for which the session has no part: of a turn whose call is not
    known, and of a tool that was not called.
    """
    name = state.trajectory
    calls = [answer.call_id for answer in state.answers]
    calls = calls if len(calls) == state.assistant_turns else []
    rewards: list[Reward] = []
    other_rewards: dict[str, float] = {}

    def add(key: str, score: float, turn: int, tool: str = "") -> None:
        if not 0 < turn <= len(calls):
            other_rewards[key] = score
            return
        part = make_reward(score, call=calls[turn - 1], tool=tool or None, id=f"{name}/{key}")
        rewards.append({**part, "extras": {"turn": turn}})

    for index, one in enumerate(state.tool_results):
        if one.reward is not None:
            add(f"call-{index}", one.reward, one.turn, one.tool)
    for record in state.turn_records:
        if record.score is not None:
            add(f"turn-{record.turn}", record.score, record.turn)
    called = {one.tool for one in state.tool_results}
    for tool, score in state.final_rewards.items():
        if tool in called:
            rewards.append(make_reward(score, tool=tool, id=f"{name}/tool-{tool}"))
        else:
            other_rewards[f"tool-{tool}"] = score
    if state.reward_score is not None:
        extras: dict[str, Any] = {
            "stop_reason": str(state.stop_reason),
            "faults": [str(fault) for fault in state.faults],
        }
        if other_rewards:
            extras["other_rewards"] = other_rewards
        if state.metrics.context_length_exceeded:
            extras["context_length_exceeded"] = True
        rewards.append({"score": state.reward_score, "id": name, "extras": extras})
    elif other_rewards:
        log.warning("%s: rewards without a part of the session are not posted: %s", name, other_rewards)
    return rewards
