"""A model by folder or by Hugging Face name: cache, hub, revisions, errors, and the name to print."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import huggingface_hub
import pytest

from branchline.core.errors import InputError, MissingExtraError
from branchline.core.extras import install_line
from branchline.core.model_folder import MODEL_FILES, find_model_folder, model_name
from tests.core.fake_hub import fake_hub, use_cache

NAME = "acme/tiny-chat"
WEIGHTS = "model-00001-of-00002.safetensors"
NEEDED = {
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "additional_chat_templates/tool_use.jinja",
    "generation_config.json",
    "preprocessor_config.json",
    "config.json",
}


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "repository"
    for file in {*NEEDED, WEIGHTS, "README.md", "consolidated.safetensors", "onnx/model.onnx"}:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(f"content of {file}")
    return folder


def files_in(folder: Path) -> set[str]:
    return {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}


def test_a_folder_is_returned_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / NAME).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_model_folder(tmp_path / NAME) == tmp_path / NAME
    assert find_model_folder(NAME) == Path(NAME)  # a folder wins over a name
    assert find_model_folder(f"~/{NAME}") == tmp_path / NAME


def test_a_name_is_fetched_once_and_only_the_files_that_are_needed(
    tmp_path: Path, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fake_hub(monkeypatch, tmp_path / "cache", {NAME: repository}) as hub:
        folder = find_model_folder(NAME)
        assert folder == hub.snapshot(NAME)
        assert files_in(folder) == hub.fetched() == NEEDED
        hub.requests.clear()
        assert find_model_folder(NAME) == folder
        assert hub.requests == []  # the local cache first


def test_weights_are_fetched_into_the_same_snapshot_when_they_are_needed(
    tmp_path: Path, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fake_hub(monkeypatch, tmp_path / "cache", {NAME: repository}) as hub:
        folder = find_model_folder(NAME)
        hub.requests.clear()
        assert find_model_folder(NAME, MODEL_FILES) == folder
        assert hub.fetched() == {WEIGHTS}
        assert files_in(folder) == {*NEEDED, WEIGHTS}


def test_a_cached_name_needs_no_hub(
    tmp_path: Path, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fake_hub(monkeypatch, tmp_path / "cache", {NAME: repository}) as hub:
        folder = find_model_folder(NAME)
    assert find_model_folder(NAME) == folder
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert find_model_folder(NAME) == folder
    assert find_model_folder(f"{NAME}@{hub.commit(NAME)}") == folder


def test_a_cache_that_lacks_a_needed_file_is_completed_or_refused(
    tmp_path: Path, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its template or its stop ids, a model would get other prompts and stop elsewhere."""
    with fake_hub(monkeypatch, tmp_path / "cache", {NAME: repository}):
        folder = find_model_folder(NAME)
        (folder / "generation_config.json").unlink()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(InputError, match="neither in the cache"):
        find_model_folder(NAME)
    with fake_hub(monkeypatch, tmp_path / "cache", {NAME: repository}):
        assert files_in(find_model_folder(NAME)) == NEEDED


def test_a_cache_that_another_tool_filled_with_single_files_is_completed(
    tmp_path: Path, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fake_hub(monkeypatch, tmp_path / "cache", {NAME: repository}) as hub:
        huggingface_hub.hf_hub_download(NAME, "tokenizer.json")
        assert files_in(hub.snapshot(NAME)) == {"tokenizer.json"}
        assert files_in(find_model_folder(NAME)) == NEEDED


def test_missing_files_come_from_the_cached_commit_and_not_from_a_newer_one(
    tmp_path: Path, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fake_hub(monkeypatch, tmp_path / "cache", {NAME: repository}) as hub:
        folder = find_model_folder(NAME)
        (repository / "chat_template.jinja").write_text("a newer template")
        assert find_model_folder(NAME) == folder
        assert find_model_folder(f"{NAME}@{hub.commit(NAME)}") == hub.snapshot(NAME) != folder
        assert (hub.snapshot(NAME) / "chat_template.jinja").read_text() == "a newer template"


def test_a_name_that_cannot_be_had_is_an_error_that_names_both_ways(
    tmp_path: Path, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_cache(monkeypatch, tmp_path / "cache")
    with pytest.raises(InputError) as unreachable:
        find_model_folder(NAME)
    assert f"{NAME}: not a directory, and as a Hugging Face name" in str(unreachable.value)
    assert f"({tmp_path / 'cache'})" in str(unreachable.value)
    assert f"give a folder, or fill the cache where there is access: hf download {NAME}." in str(
        unreachable.value
    )
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(InputError, match="HF_HUB_OFFLINE"):
        find_model_folder(NAME)
    with (
        fake_hub(monkeypatch, tmp_path / "cache", {NAME: repository}),
        pytest.raises(InputError, match=r"acme/other@v2: .*hf download acme/other --revision v2.*404"),
    ):
        find_model_folder("acme/other@v2")


@pytest.mark.parametrize(
    "name", ["", "/nowhere", "./nowhere", "~/nowhere", "a/b/c", "https://huggingface.co/a/b", "a/b:Q4_K_M"]
)
def test_what_is_neither_a_folder_nor_a_name_is_never_looked_up(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    if name:
        with pytest.raises(InputError, match="not a directory, expected the folder of a model or a Hugging"):
            find_model_folder(name)
    else:
        assert find_model_folder(name) == Path()


def test_a_path_is_always_a_folder_and_a_file_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    for name in (Path(NAME), "file"):
        with pytest.raises(InputError, match="not a directory"):
            find_model_folder(name)


def test_a_missing_package_is_named_with_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(MissingExtraError, match=re.escape(install_line("serve"))):
        find_model_folder(NAME)


def test_a_snapshot_is_named_after_its_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = tmp_path / "models--acme--tiny-chat" / "snapshots" / "1a2b3c"
    snapshot.mkdir(parents=True)
    (tmp_path / "link").symlink_to(snapshot)
    monkeypatch.chdir(tmp_path)
    names = [model_name(folder) for folder in (snapshot, Path("link"), Path())]
    assert names == ["tiny-chat", "tiny-chat", tmp_path.name]
