"""Metrics: a JSON line for each step, trackers by name."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from branchline.core.errors import InputError, MissingExtraError
from branchline.train.metrics import MetricsLog, read_metrics


def test_lines_after_a_checkpoint_and_a_torn_line_are_removed(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    for step in (1, 2, 3):
        log.write({"step": step, "reward": step / 4})
    with log.path.open("a") as file:
        file.write('{"step": 4, "rew')
    assert [line["step"] for line in read_metrics(log.path)] == [1, 2, 3]
    log.truncate(2)
    log.write({"step": 3, "reward": 0.5})
    assert read_metrics(log.path) == [
        {"step": 1, "reward": 0.25},
        {"step": 2, "reward": 0.5},
        {"step": 3, "reward": 0.5},
    ]


def read_strictly(path: Path) -> list[dict[str, float]]:
    def refuse(name: str) -> float:
        raise AssertionError(f"{name} is no JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_figures_that_are_no_numbers_are_left_out_and_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = MetricsLog(tmp_path)
    log.write({"step": 1, "entropy": math.nan, "kl/sampler": math.inf, "reward": 0.5})
    assert read_strictly(log.path) == [{"step": 1, "reward": 0.5}]
    assert "step 1: not finite and left out of the metrics: entropy, kl/sampler" in caplog.text


def test_an_older_file_with_nan_is_strict_json_after_a_resume(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    log.path.write_text('{"step": 1, "loss": NaN, "reward": 0.5}\n{"step": 2, "reward": -Infinity}\n')
    log.truncate(1)
    assert read_strictly(log.path) == [{"step": 1, "reward": 0.5}]


def test_a_run_without_metrics_is_empty(tmp_path: Path) -> None:
    assert read_metrics(tmp_path / "metrics.jsonl") == []
    MetricsLog(tmp_path).truncate(0)


def record(calls: list[Any], name: str) -> Any:
    return lambda *args, **kwargs: calls.append((name, args, kwargs))


@pytest.mark.parametrize("name", ["trackio", "wandb"])
def test_trackers_get_the_metrics_of_each_step(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    module = SimpleNamespace(**{verb: record(calls, verb) for verb in ("init", "log", "finish")})
    monkeypatch.setitem(sys.modules, name, module)  # type: ignore[arg-type]
    log = MetricsLog(tmp_path, (name,))  # type: ignore[arg-type]
    assert not calls
    log.write({"step": 1, "reward": 0.5})
    log.close()
    assert calls == [
        ("init", (), {"project": "branchline", "name": tmp_path.name}),
        ("log", ({"reward": 0.5},), {"step": 1}),
        ("finish", (), {}),
    ]


def test_mlflow_gets_the_metrics_of_each_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    verbs = ("set_experiment", "start_run", "log_metrics", "end_run")
    module = SimpleNamespace(**{verb: record(calls, verb) for verb in verbs})
    monkeypatch.setitem(sys.modules, "mlflow", module)  # type: ignore[arg-type]
    log = MetricsLog(tmp_path, ("mlflow",))
    log.write({"step": 7, "reward": 0.5})
    log.close()
    assert [verb for verb, _, _ in calls] == list(verbs)
    assert calls[2] == ("log_metrics", ({"reward": 0.5},), {"step": 7})


def test_an_unknown_or_missing_tracker_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="report_to: got 'tensorboard', expected one of trackio"):
        MetricsLog(tmp_path, ("tensorboard",))  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "trackio", None)  # type: ignore[arg-type]
    with pytest.raises(MissingExtraError, match=r"pip install trackio$"):
        MetricsLog(tmp_path, ("trackio",))
