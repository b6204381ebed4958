"""A trajectory and its session: where its calls are recorded, and which results it sends at the end.

A state that was interrupted resumes only in a session that has all its calls: in any other, the tokens of the
missing calls would be context that is never trained. At the end the session gets the rewards, so that its
samples carry them, and its new state.
"""

from __future__ import annotations

from typing import Any

from branchline.core.errors import InputError
from branchline.loop.model import SessionControl
from branchline.loop.state import LoopState
from branchline.loop.timeouts import finish_despite_cancel


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


def session_rewards(state: LoopState) -> list[dict[str, Any]]:
    """The rewards of a trajectory as its session stores them: of tool calls, turns and tools, then the whole.

    `call` is the call whose answer is rewarded, if every turn of the trajectory is known.
    """
    name = state.trajectory
    calls = [answer.call_id for answer in state.answers]
    calls = calls if len(calls) == state.assistant_turns else []

    def of_turn(turn: int) -> dict[str, Any]:
        return {"turn": turn, "call": calls[turn - 1]} if 0 < turn <= len(calls) else {"turn": turn}

    rewards: list[dict[str, Any]] = [
        {"id": f"{name}/call-{index}", "score": one.reward, "tool": one.tool, **of_turn(one.turn)}
        for index, one in enumerate(state.tool_results)
        if one.reward is not None
    ]
    rewards += [
        {"id": f"{name}/turn-{one.turn}", "score": one.score, **of_turn(one.turn)}
        for one in state.turn_records
        if one.score is not None
    ]
    rewards += [
        {"id": f"{name}/tool-{tool}", "score": score, "tool": tool}
        for tool, score in state.final_rewards.items()
    ]
    if state.reward_score is not None:
        faults = [str(fault) for fault in state.faults]
        whole = {"score": state.reward_score, "stop_reason": str(state.stop_reason), "faults": faults}
        if state.metrics.context_length_exceeded:
            whole["context_length_exceeded"] = True
        rewards.append({"id": name, **whole})
    return rewards
