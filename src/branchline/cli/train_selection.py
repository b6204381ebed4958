"""Which calls of a log are trained: the options `--train-model` and `--rule`.

Calls of other models stay in the tree as context, and their tokens are listed as dropped (`untrained`).
Samples of two models are not written unless an option says which of them are trained.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from branchline.cli.commands.merge import SelectionOptions
from branchline.cli.render import sanitize
from branchline.core.errors import InputError
from branchline.runtime.routing_rule import RoutingRule
from branchline.timelines.log import LoggedCall

_MAX_NAMES = 20


def select_trained(
    calls: list[LoggedCall], options: SelectionOptions, writes_samples: bool
) -> list[LoggedCall]:
    """Returns the calls, with those that are not trained marked. Raises InputError if a name or a pattern
    fits no call, or if samples of several models are to be written without a choice."""
    models = {call.model for call in calls}
    if options.train_model:
        for name in options.train_model:
            if name not in models:
                raise InputError(f"--train-model: got {name!r}, expected one of the log's: {_names(models)}")
        return [_train(call, call.model in options.train_model) for call in calls]
    rules = [_read_rule(text, calls) for text in options.rule]
    if writes_samples and not rules and len(models) > 1:
        raise InputError(
            f"--samples: the log has calls of {len(models)} models ({_names(models)}); expected --train-model"
            " with those to train, or --rule 'model=*' to train all of them"
        )
    return [_train(call, _is_trained(call, rules)) for call in calls]


def _read_rule(text: str, calls: Sequence[LoggedCall]) -> RoutingRule:
    rule = RoutingRule.parse(text)
    if rule.engine:
        raise InputError(
            f"--rule: got engine={rule.engine}, expected model, agent and train: a log has no engines"
        )
    if not any(rule.matches(call.model, call.agent) for call in calls):
        models, agents = {call.model for call in calls}, {call.agent for call in calls}
        raise InputError(
            f"--rule: got {text!r}, which no call matches; the log has models {_names(models)} and agents "
            f"{_names(agents)}"
        )
    return rule


def _is_trained(call: LoggedCall, rules: Sequence[RoutingRule]) -> bool:
    return next((rule.train for rule in rules if rule.matches(call.model, call.agent)), True)


def _train(call: LoggedCall, is_trained: bool) -> LoggedCall:
    return call if is_trained else replace(call, request=replace(call.request, trainable=False))


def _names(names: set[str]) -> str:
    shown = [sanitize(name) or "(no name)" for name in sorted(names)[:_MAX_NAMES]]
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return ", ".join(shown) + more


def models_to_json(calls: Sequence[LoggedCall]) -> list[dict[str, Any]]:
    """Returns the models of a log with their calls, as --json lists them."""
    counts = Counter(call.model for call in calls)
    trained = Counter(call.model for call in calls if call.request.trainable)
    return [
        {"model": name or None, "calls": count, "trained_calls": trained[name]}
        for name, count in counts.most_common()
    ]
