"""Finds the rewards of a request that repeat earlier ones: a client that does not know whether its request
arrived can repeat it.

A reward repeats an earlier one if it equals it, has an `id`, and no reward was posted with this `id` since
then for the part that the earlier one named, nor for the part that it would name now (a turn may have become
another answer). A list is the same as its items one after another.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping, Sequence
from typing import Any

from branchline.core.reward import PART_KEYS, Reward
from branchline.export.rewards import RewardParts


class PostedRewards:
    """The rewards of a session, to which others only append."""

    def __init__(self, rewards: Sequence[Reward]) -> None:
        self._rewards = rewards
        self._latest: dict[tuple[object, ...], int] = {}
        """The index of the latest reward with an id that names its part so."""
        self._indexed = 0

    def find_new(self, posted: Sequence[Reward], parts: RewardParts) -> list[tuple[int, Reward]]:
        """Returns the rewards of a request that repeat none, with their positions; those of turns with their
        answers. Raises MessageError if one is for a part that the session does not have."""
        for index, reward in enumerate(self._rewards[self._indexed :], self._indexed):
            if "id" in reward:
                self._latest[_naming(reward)] = index
        self._indexed = len(self._rewards)
        rewards, latest = [*self._rewards], ChainMap({}, self._latest)
        new: list[tuple[int, Reward]] = []
        for position, reward in enumerate(posted):
            if "id" in reward:
                earlier = latest.get(_naming(reward))
                if earlier is not None and _is_repeat(reward, rewards[earlier:], parts):
                    continue
                latest[_naming(reward)] = len(rewards)
            rewards.append(parts.resolve(reward))
            new.append((position, rewards[-1]))
        return new


def _is_repeat(posted: Reward, recorded: Sequence[Reward], parts: RewardParts) -> bool:
    """Whether a reward repeats the first of these, which names its part in the same way."""
    first, *later = recorded
    if {name: value for name, value in first.items() if name != "turn_node"} != posted:
        return False
    with_id = [reward for reward in later if reward.get("id") == posted["id"]]
    rewarded = {*parts.targets(first), *parts.targets(posted)} if with_id else set()
    return all(rewarded.isdisjoint(parts.targets(reward)) for reward in with_id)


def _naming(reward: Mapping[str, Any]) -> tuple[object, ...]:
    return tuple([repr(reward.get(name)) for name in ("id", *PART_KEYS)])
