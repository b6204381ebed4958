"""TokenizerDir: ids, the exact bytes of tokens, template sources, and errors that name the file."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from branchline.chat.generic.codec import GenericCodec
from branchline.chat.tokenizer import VOCABULARY_PADDING, TokenizerDir
from branchline.core.errors import CodecError, InputError, MissingExtraError
from branchline.core.extras import install_line
from branchline.core.token_arrays import as_ids
from tests.chat.harness import HELLO_MERGES, save_byte_level
from tests.core.fake_hub import fake_hub

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def save_sentencepiece_style(path: Path) -> Path:
    vocab = {"<unk>": 0, "<0x41>": 1, "<0xE4>": 2, "▁a": 3, "▁▁": 4, "b": 5, "<0xzz>": 6}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback()])
    tokenizer.add_special_tokens([AddedToken("<s▁>", special=True)])
    tokenizer.add_tokens([AddedToken("▁▁▁", special=False, normalized=False)])
    tokenizer.save(str(path / "tokenizer.json"))
    return path


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_byte_level(
        tmp_path_factory.mktemp("model"),
        special=["<|start|>", "<|end▁é|>"],
        added=["<tool>", "<|end|>"],
        merges=HELLO_MERGES,
    )


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> TokenizerDir:
    return TokenizerDir.open(directory)


def token_bytes(tokenizer: TokenizerDir, *ids: int) -> bytes:
    return b"".join(map(tokenizer.token_bytes, ids))


# Ids and bytes


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.text())
def test_the_bytes_of_a_texts_tokens_are_the_bytes_of_the_text(tokenizer: TokenizerDir, text: str) -> None:
    assert token_bytes(tokenizer, *tokenizer.encode(text).tolist()) == text.encode()


def test_every_byte_has_a_token(tokenizer: TokenizerDir) -> None:
    assert {tokenizer.token_bytes(token) for token in range(256)} == {bytes([byte]) for byte in range(256)}


def test_different_ids_of_one_text_have_the_same_bytes(tokenizer: TokenizerDir) -> None:
    whole = tokenizer.encode("hello")
    parts = [*tokenizer.encode("h").tolist(), *tokenizer.encode("ello").tolist()]
    assert len(whole) == 1
    assert len(parts) == 2
    assert token_bytes(tokenizer, *parts) == token_bytes(tokenizer, *whole.tolist()) == b"hello"


def test_the_bytes_of_an_added_token_are_its_content(tokenizer: TokenizerDir) -> None:
    ids = tokenizer.encode("<|start|><|end▁é|><tool>")
    assert len(ids) == 3
    assert token_bytes(tokenizer, *ids.tolist()) == "<|start|><|end▁é|><tool>".encode()


def test_encoding_adds_no_tokens_and_ignores_truncation(tokenizer: TokenizerDir) -> None:
    assert len(tokenizer.encode("a b c d e f")) == 11
    assert tokenizer.encode("").tolist() == []


def test_a_lone_surrogate_is_replaced(tokenizer: TokenizerDir) -> None:
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a\ufffdb"


def test_decoding_shows_special_tokens_invalid_bytes_and_unknown_ids(tokenizer: TokenizerDir) -> None:
    half = tokenizer.encode("é").tolist()[0]
    start = tokenizer.encode("<|start|>").tolist()[0]
    assert tokenizer.decode(as_ids([start, half, 99_999, -1])) == "<|start|>\ufffd<99999><-1>"


def test_sentencepiece_tokens_decode_to_spaces_and_single_bytes(tmp_path: Path) -> None:
    tokenizer = TokenizerDir.open(save_sentencepiece_style(tmp_path))
    spellings = [tokenizer.token_bytes(token) for token in range(9)]
    assert spellings == [b"<unk>", b"A", b"\xe4", b" a", b"  ", b"b", b"<0xzz>", "<s▁>".encode(), b"   "]


def test_known_ids_pass_the_check(tokenizer: TokenizerDir) -> None:
    assert tokenizer.invalid_id_error(as_ids(range(tokenizer.vocab_size))) is None
    assert tokenizer.invalid_id_error(as_ids([])) is None


@pytest.mark.parametrize(
    ("config", "extra"),
    [
        (None, VOCABULARY_PADDING),
        ({}, VOCABULARY_PADDING),
        ({"vocab_size": 100_000}, None),
        ({"text_config": {"vocab_size": 100_000}}, None),
        ({"vocab_size": 3}, 0),
        ({"vocab_size": "many", "text_config": 1}, VOCABULARY_PADDING),
    ],
)
def test_the_vocabulary_of_the_model_may_be_larger_than_that_of_the_tokenizer(
    tmp_path: Path, config: dict[str, object] | None, extra: int | None
) -> None:
    save_byte_level(tmp_path, special=["<|end|>"])
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    tokenizer = TokenizerDir.open(tmp_path)
    expected = 100_000 if extra is None else tokenizer.vocab_size + extra
    assert tokenizer.model_vocab_size == expected
    assert GenericCodec(tokenizer, chat_template=TEMPLATE).vocab_size == expected


@pytest.mark.parametrize("bad", [100_000, -3])
def test_the_check_names_the_first_unknown_id_its_index_and_the_range(
    tokenizer: TokenizerDir, bad: int
) -> None:
    problem = tokenizer.invalid_id_error(as_ids([1, 2, bad, 200_000])) or ""
    assert f"id {bad} at index 2 does not decode" in problem
    assert f"0 to {tokenizer.vocab_size - 1}" in problem


def test_the_bytes_of_an_unknown_id_raise(tokenizer: TokenizerDir) -> None:
    with pytest.raises(CodecError, match="id 100000 does not decode"):
        tokenizer.token_bytes(100_000)


# Templates


def test_prompts_with_tools_use_the_tool_template(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with tools"}]
    tokenizer = TokenizerDir.open(save_byte_level(tmp_path, chat_template=named))
    assert tokenizer.template_source() == "plain"
    assert tokenizer.template_source(tools=True) == "with tools"


def test_a_template_file_takes_precedence_over_the_config(tmp_path: Path) -> None:
    save_byte_level(tmp_path, chat_template="old", bos_token={"content": "<|start|>"})
    (tmp_path / "chat_template.jinja").write_text("new")
    tokenizer = TokenizerDir.open(tmp_path)
    assert tokenizer.template_source() == "new"
    assert tokenizer.special_tokens == {"bos_token": "<|start|>"}


def test_a_directory_without_a_template_has_no_source(tokenizer: TokenizerDir) -> None:
    assert not tokenizer.has_template
    with pytest.raises(CodecError, match="it has none"):
        tokenizer.template_source()


# Files


def test_a_missing_directory_or_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nowhere: not a directory"):
        TokenizerDir.open(tmp_path / "nowhere")
    with pytest.raises(CodecError, match=r"tokenizer\.json: cannot be read"):
        TokenizerDir.open(tmp_path)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"model": {"type": "Nonsense"}}', '{"added_tokens": 3}']
)
def test_a_broken_tokenizer_file_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(CodecError, match=r"tokenizer\.json: not a tokenizer"):
        TokenizerDir.open(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", '{"chat_template": 3}', '{"chat_template": [{"name": "x"}]}'])
def test_a_broken_config_is_named(tmp_path: Path, text: str) -> None:
    save_byte_level(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(text)
    with pytest.raises(CodecError, match=r"tokenizer_config\.json: .*expected"):
        TokenizerDir.open(tmp_path)


def test_a_missing_package_is_named_with_how_to_install_it(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(MissingExtraError, match=re.escape(install_line("serve"))):
        TokenizerDir.open(directory)


def test_ids_are_read_only_int32(tokenizer: TokenizerDir) -> None:
    ids = tokenizer.encode("hello")
    assert ids.dtype == np.int32
    assert not ids.flags.writeable


def test_named_templates_in_their_own_folder_are_read(tmp_path: Path) -> None:
    save_byte_level(tmp_path, chat_template="from the config")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("with tools")
    (tmp_path / "additional_chat_templates" / "notes.txt").write_text("no template")
    tokenizer = TokenizerDir.open(tmp_path)
    assert tokenizer.template_source() == "from the config"
    assert tokenizer.template_source(tools=True) == "with tools"
    (tmp_path / "chat_template.jinja").write_text("from the file")
    tokenizer = TokenizerDir.open(tmp_path)
    assert tokenizer.template_source() == "from the file"
    assert tokenizer.template_source(tools=True) == "with tools"


def test_a_template_file_replaces_all_templates_of_the_config(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "old"}, {"name": "tool_use", "template": "old tools"}]
    save_byte_level(tmp_path, chat_template=named)
    (tmp_path / "chat_template.jinja").write_text("new")
    assert TokenizerDir.open(tmp_path).template_source(tools=True) == "new"


def test_special_tokens_may_be_named_in_their_own_file(tmp_path: Path) -> None:
    save_byte_level(tmp_path, chat_template="{{ bos_token }}", eos_token=None, pad_token="<|start|>")
    tokens = {"bos_token": {"content": "<|start|>"}, "eos_token": "<|end|>", "pad_token": "<|end|>"}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(tokens))
    tokenizer = TokenizerDir.open(tmp_path)
    assert tokenizer.special_tokens == {
        "bos_token": "<|start|>",
        "eos_token": "<|end|>",
        "pad_token": "<|start|>",
    }
    assert tokenizer.stop_ids == {tokenizer.added_tokens["<|end|>"]}


def test_a_tokenizer_is_opened_by_its_hugging_face_name(
    tmp_path: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fake_hub(monkeypatch, tmp_path, {"acme/tiny": directory}) as hub:
        opened = TokenizerDir.open("acme/tiny")
        assert (opened.path, opened.name) == (hub.snapshot("acme/tiny"), "tiny")
    assert (
        opened.encode("hello <tool>").tolist() == TokenizerDir.open(directory).encode("hello <tool>").tolist()
    )
    assert TokenizerDir.open("acme/tiny").path == opened.path  # cached: no hub
