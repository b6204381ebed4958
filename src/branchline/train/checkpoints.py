"""Checkpoints of a run: a model folder that transformers loads, and beside it what continues the same run.

    RUN/checkpoints/step-000020/    config.json, model.safetensors, tokenizer files
                                    trainer_state.json, optimizer.pt (optimizer and random state)

A checkpoint is written under another name and then renamed, so a folder with this name is complete.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from branchline.core.errors import InputError

_PREFIX = "step-"
_STATE_FILE, _OPTIMIZER_FILE = "trainer_state.json", "optimizer.pt"
_TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "chat_template*",
                    "additional_chat_templates", "vocab*", "merges.txt")  # fmt: skip


@dataclass(frozen=True)
class CheckpointState:
    """What a run needs to continue, besides weights and optimizer."""

    step: int
    """The number of completed steps, which is the policy version."""
    seed: int
    num_tokens: int
    """Tokens sampled so far."""


def save_checkpoint(
    run_folder: Path, model: Any, optimizer: Any, state: CheckpointState, *, tokenizer_folder: Path, keep: int
) -> Path:
    """Writes a checkpoint and removes older ones, except the last `keep`; returns its folder."""
    folder = run_folder / "checkpoints" / f"{_PREFIX}{state.step:06}"
    if folder.exists():
        return folder
    partial = folder.with_name(f"partial-{folder.name}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        _write_files(partial, model, optimizer, state, tokenizer_folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)  # It may have filled the disk.
        raise
    partial.rename(folder)
    for old in _checkpoint_folders(run_folder)[:-keep]:
        shutil.rmtree(old)
    return folder


def _write_files(
    folder: Path, model: Any, optimizer: Any, state: CheckpointState, tokenizer_folder: Path
) -> None:
    logs: Any = transformers.utils.logging
    logs.disable_progress_bar()
    model.save_pretrained(folder)
    for pattern in _TOKENIZER_FILES:
        for path in tokenizer_folder.glob(pattern):
            copy = shutil.copytree if path.is_dir() else shutil.copy
            copy(path, folder / path.name)
    random_state = torch.get_rng_state()
    torch.save({"optimizer": optimizer.state_dict(), "random_state": random_state}, folder / _OPTIMIZER_FILE)
    (folder / _STATE_FILE).write_text(json.dumps(state.__dict__) + "\n")


def find_checkpoint(run_folder: Path) -> Path | None:
    """Returns the folder of the last checkpoint of a run, or None."""
    folders = _checkpoint_folders(run_folder)
    return folders[-1] if folders else None


def load_state(folder: Path) -> CheckpointState:
    """Returns the state of a checkpoint. Raises InputError for a file that is none."""
    try:
        return CheckpointState(**json.loads((folder / _STATE_FILE).read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"{folder / _STATE_FILE}: {error}, expected the state of a run") from error


def load_optimizer(folder: Path, optimizer: Any) -> None:
    """Restores the optimizer and torch's random state."""
    saved = torch.load(folder / _OPTIMIZER_FILE, weights_only=True)
    optimizer.load_state_dict(saved["optimizer"])
    torch.set_rng_state(saved["random_state"])


def _checkpoint_folders(run_folder: Path) -> list[Path]:
    return sorted((run_folder / "checkpoints").glob(f"{_PREFIX}*"))
