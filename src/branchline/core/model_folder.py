"""The files of a model, by folder or by Hugging Face name.

A name is looked up in the local cache first. The commit that the cache holds is the one that is used: files
that are missing are fetched from the hub at that commit, so files of two commits are never mixed. Only a
name that is not cached is resolved at the hub. The result is always a folder.

    find_model_folder("~/models/Qwen3-8B")
    find_model_folder("Qwen/Qwen3-8B")
    find_model_folder("Qwen/Qwen3-8B@1a2b3c4")  # a branch, tag or commit
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from branchline.core.errors import InputError
from branchline.core.extras import requires_extra
from branchline.core.suggestions import did_you_mean_path

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "additional_chat_templates/*",
    "generation_config.json",
    "preprocessor_config.json",
    "config.json",
)
"""All that a codec reads."""
MODEL_FILES = (*TOKENIZER_FILES, "model*.safetensors", "model*.safetensors.index.json", "*.py")
"""All that a codec and the embedded engine read. Code is run only with `trust_remote_code`."""

_HUB_NAME = re.compile(r"(?P<repo>\w[\w.-]*(/\w[\w.-]*)?)(@(?P<revision>[\w./-]+))?", re.ASCII)
_EXPECTED = "expected the folder of a model or a Hugging Face name such as Qwen/Qwen3-8B"
_CACHE_FOLDER_PREFIX = "models--"
_MAX_REASON_CHARS = 300


def find_model_folder(name: str | Path, files: Sequence[str] = TOKENIZER_FILES) -> Path:
    """Returns the folder `name`, or one with these files of the Hugging Face model `name`.

    A folder wins over a name, and a Path is always a folder. Raises InputError if neither can be had.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    match = None if isinstance(name, Path) or folder.exists() else _HUB_NAME.fullmatch(name)
    if match is None:
        raise InputError(f"{name}: not a directory, {_EXPECTED}{did_you_mean_path(folder)}")
    return _fetch(match["repo"], match["revision"], files)


def model_name(folder: Path) -> str:
    """Returns the name of the folder, or that of the model if the folder belongs to the Hugging Face cache.

    >>> model_name(Path("/models/Qwen3-8B"))
    'Qwen3-8B'
    >>> model_name(Path("/hub/models--Qwen--Qwen3-8B/snapshots/1a2b3c4"))
    'Qwen3-8B'
    """
    folder = folder.resolve()
    repository = folder.parent.parent.name
    if folder.parent.name == "snapshots" and repository.startswith(_CACHE_FOLDER_PREFIX):
        return repository.rpartition("--")[2]
    return folder.name


def _fetch(repo: str, revision: str | None, files: Sequence[str]) -> Path:
    """Returns the snapshot folder of the cache, after fetching the files that are missing in it."""
    with requires_extra():
        from huggingface_hub import snapshot_download
    try:
        cached = _cached_commit(repo, revision)
        # With a commit that is cached completely there is no request. If the hub cannot be reached, a cached
        # snapshot is used unless the cache records that the repository has more of these files.
        return Path(snapshot_download(repo, revision=cached or revision, allow_patterns=list(files)))
    except Exception as error:
        # The hub's HTTP client has errors of its own, which are no OSError.
        raise InputError(_describe_failure(repo, revision, error)) from error


def _cached_commit(repo: str, revision: str | None) -> str | None:
    """Returns the commit that the local cache holds for a revision, or None."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        # No pattern: a snapshot counts even if files are missing in it.
        return Path(snapshot_download(repo, revision=revision, local_files_only=True, allow_patterns=[])).name
    except LocalEntryNotFoundError:
        return None


def _describe_failure(repo: str, revision: str | None, error: Exception) -> str:
    from huggingface_hub import constants

    name = repo if revision is None else f"{repo}@{revision}"
    reason = " ".join(str(error).split())[:_MAX_REASON_CHARS]
    command = f"hf download {repo}" if revision is None else f"hf download {repo} --revision {revision}"
    return (
        f"{name}: not a directory, and as a Hugging Face name it has files that are neither in the cache "
        f"({constants.HF_HUB_CACHE}) nor could be fetched from the hub; {_EXPECTED}. Without access to the "
        f"hub, give a folder, or fill the cache where there is access: {command}. The hub's error: "
        f"{type(error).__name__}: {reason}"
    )
