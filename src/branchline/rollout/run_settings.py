"""What a run is, as a file in its folder: the settings that must stay the same when it is resumed.

A run that continued with another agent, reward or model would mix sessions that cannot be compared. So its
settings are written when it begins, and a resumed run must have the same.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from branchline.core.errors import InputError
from branchline.export.jsonl import replace_file
from branchline.rollout.rewards import RewardFunction, VerifierCommand
from branchline.rollout.runners import (
    CommandRunner,
    DispatchRunner,
    FunctionRunner,
    LoopRunner,
    RemoteRunner,
    Runner,
)

JsonValue = Mapping[str, Any] | str | int | None
RUN_FILE = "run.json"
log = logging.getLogger("branchline.rollout")


def read_settings(file: Path) -> dict[str, Any]:
    """Returns the settings that a run has written. Raises InputError for a file that has none."""
    try:
        settings = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise InputError(f"{file}: {error}, expected the settings of a run") from error
    if not isinstance(settings, dict):
        raise InputError(f"{file}: got {settings!r}, expected the settings of a run")
    return settings


def keep_settings(
    file: Path, settings: Mapping[str, Any], *, resume: bool, older: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Writes the settings of a new run; compares those of a resumed one with what it has written. Returns the
    settings that the file has then.

    `older` are the values of settings that runs of older versions did not write. Raises InputError with every
    setting that differs. Other settings that the file does not have are added, which the log says.
    """
    got: dict[str, Any] = json.loads(json.dumps(settings))
    known: dict[str, Any] = {}
    if resume:
        known = {**(older or {}), **(read_settings(file) if file.exists() else {})}
    differences = [
        f"{name}: this run has {known[name]!r}, got {value!r}"
        for name, value in got.items()
        if name in known and known[name] != value
    ]
    if differences:
        raise InputError(f"{'; '.join(differences)}; expected those of {file}, or another folder")
    missing = [name for name in got if name not in known]
    if resume and missing:
        names = ", ".join(missing)
        log.warning("%s does not say what the run had as %s; it continues with those given now", file, names)
    merged = {**known, **got}
    if missing or not resume:
        with replace_file(file) as opened:
            opened.write(json.dumps(merged, indent=1).encode() + b"\n")
    return merged


def describe_runner(runner: Runner) -> JsonValue:
    """Returns what an agent is: its function, command or address; the class of another runner."""
    if isinstance(runner, FunctionRunner):
        function = runner.function
        return function if isinstance(function, str) else name_function(function)
    if isinstance(runner, CommandRunner):
        return {"command": runner.command}
    if isinstance(runner, RemoteRunner):
        return {"url": runner.url}
    if isinstance(runner, LoopRunner):
        return {"loop": runner.name, **_describe_loop(runner)}
    if isinstance(runner, DispatchRunner):
        return describe_runners(runner.runners)
    return name_function(runner)


def _describe_loop(runner: LoopRunner) -> dict[str, JsonValue]:
    """Returns what an agent of the loop has by options."""
    described: dict[str, JsonValue] = {}
    if runner.config_file:
        content = Path(runner.config_file).read_bytes()
        described["config"] = hashlib.blake2b(content, digest_size=8).hexdigest()
    if runner.model_length is not None:
        described["model_length"] = runner.model_length
    if (options := runner.context_options) is not None:
        compaction = None if options.compaction is None else name_function(options.compaction)
        described["context"] = {
            "context_length_penalty": options.context_length_penalty,
            "response_room": options.response_room,
            "compaction": compaction,
            "compaction_target": options.compaction_target,
        }
    return described


def describe_runners(runners: Mapping[str, Runner]) -> JsonValue:
    """Returns what the agents of a run are, by their names."""
    return {name: describe_runner(runner) for name, runner in sorted(runners.items())}


def describe_reward(reward: RewardFunction | VerifierCommand | None) -> JsonValue:
    """Returns what computes the reward; None if nothing does."""
    if reward is None or isinstance(reward, VerifierCommand):
        return None if reward is None else asdict(reward)
    return name_function(reward)


def name_function(function: object) -> str:
    """Returns `module:name` of a function, or of the class of something else."""
    named: Any = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}:{named.__qualname__}"
