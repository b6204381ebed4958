"""A tokenizer directory gives ids, their exact bytes, and the prompt its template writes."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from branchline.chat.tokenizer import TokenizerDir
from branchline.core.errors import CodecError
from branchline.core.message import Media, Message, ToolCall
from branchline.core.token_arrays import as_ids

CHATML = (
    "{%- if tools %}tools:{{ tools | tojson }}\n{% endif %}"
    "{%- for message in messages %}"
    "<|start|>{{ message.role }}\n{{ message.content }}"
    "{%- for call in message.tool_calls or [] %}{{ call.function.arguments | tojson }}{% endfor %}"
    "<|end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def save_byte_level(path: Path, added: Sequence[str] = (), **config: Any) -> Path:
    """A byte-level BPE with a few merges: `hello` is one token, and so are `h` and `ello`."""
    vocab = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = [("l", "o"), ("l", "lo"), ("e", "llo"), ("h", "ello"), ("Ġ", "hello")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken("<|start|>", special=True), AddedToken("<|end▁é|>", special=True)]
    )
    tokenizer.add_tokens([AddedToken("<tool>", special=False), AddedToken("<|end|>", special=False)])
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in added])
    tokenizer.enable_truncation(4)
    path.mkdir(exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


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
    return save_byte_level(tmp_path_factory.mktemp("model"), chat_template=CHATML)


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


def test_all_256_bytes_can_be_spelled(tokenizer: TokenizerDir) -> None:
    assert {tokenizer.token_bytes(token) for token in range(256)} == {bytes([byte]) for byte in range(256)}


def test_one_text_has_several_spellings_and_they_are_the_same_bytes(tokenizer: TokenizerDir) -> None:
    whole = tokenizer.encode("hello")
    parts = [*tokenizer.encode("h").tolist(), *tokenizer.encode("ello").tolist()]
    assert len(whole) == 1
    assert len(parts) == 2
    assert token_bytes(tokenizer, *parts) == token_bytes(tokenizer, *whole.tolist()) == b"hello"


def test_added_tokens_spell_their_content_whatever_letters_it_has(tokenizer: TokenizerDir) -> None:
    ids = tokenizer.encode("<|start|><|end▁é|><tool>")
    assert len(ids) == 3
    assert token_bytes(tokenizer, *ids.tolist()) == "<|start|><|end▁é|><tool>".encode()


def test_nothing_is_added_and_nothing_cut_whatever_the_file_asks_for(tokenizer: TokenizerDir) -> None:
    assert len(tokenizer.encode("a b c d e f")) == 11
    assert tokenizer.encode("").tolist() == []


def test_a_lone_surrogate_is_replaced_and_does_not_raise(tokenizer: TokenizerDir) -> None:
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a\ufffdb"


def test_decoding_shows_special_tokens_broken_letters_and_unknown_ids(tokenizer: TokenizerDir) -> None:
    half = tokenizer.encode("é").tolist()[0]
    start = tokenizer.encode("<|start|>").tolist()[0]
    assert tokenizer.decode(as_ids([start, half, 99_999, -1])) == "<|start|>\ufffd<99999><-1>"


def test_sentencepiece_tokens_spell_spaces_and_single_bytes(tmp_path: Path) -> None:
    tokenizer = TokenizerDir.open(save_sentencepiece_style(tmp_path))
    spellings = [tokenizer.token_bytes(token) for token in range(9)]
    assert spellings == [b"<unk>", b"A", b"\xe4", b" a", b"  ", b"b", b"<0xzz>", "<s▁>".encode(), b"   "]


def test_ids_that_decode_pass_the_check(tokenizer: TokenizerDir) -> None:
    assert tokenizer.invalid_id_error(as_ids(range(tokenizer.vocab_size))) is None
    assert tokenizer.invalid_id_error(as_ids([])) is None


@pytest.mark.parametrize("bad", [100_000, -3])
def test_the_check_names_the_first_bad_id_its_place_and_the_range(tokenizer: TokenizerDir, bad: int) -> None:
    problem = tokenizer.invalid_id_error(as_ids([1, 2, bad, 200_000])) or ""
    assert f"id {bad} at place 2 does not decode" in problem
    assert f"0 to {tokenizer.vocab_size - 1}" in problem


def test_the_bytes_of_an_unknown_id_are_refused(tokenizer: TokenizerDir) -> None:
    with pytest.raises(CodecError, match="id 100000 does not decode"):
        tokenizer.token_bytes(100_000)


# Templates


def test_a_template_writes_the_prompt_and_json_keeps_its_letters(tokenizer: TokenizerDir) -> None:
    call = ToolCall("f", '{"z": "<é>", "a": 1}')
    messages = [Message("user", "hi"), Message("assistant", "", tool_calls=(call,))]
    assert tokenizer.render_prompt(messages, [{"name": "<f>"}]) == (
        'tools:[{"name": "<f>"}]\n<|start|>user\nhi<|end|>\n'
        '<|start|>assistant\n{"z": "<é>", "a": 1}<|end|>\n<|start|>assistant\n'
    )


def test_a_rendered_prompt_encodes_its_markers_as_single_tokens(tokenizer: TokenizerDir) -> None:
    ids = tokenizer.encode_prompt([Message("user", "hello")])
    assert ids[0] == tokenizer.encode("<|start|>")[0]
    assert tokenizer.decode(ids) == "<|start|>user\nhello<|end|>\n<|start|>assistant\n"


def test_tools_choose_the_template_that_is_made_for_them(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with tools"}]
    tokenizer = TokenizerDir.open(save_byte_level(tmp_path, chat_template=named))
    assert tokenizer.render_prompt([Message("user", "hi")]) == "plain"
    assert tokenizer.render_prompt([Message("user", "hi")], [{"name": "f"}]) == "with tools"


def test_a_template_file_goes_before_the_config(tmp_path: Path) -> None:
    save_byte_level(tmp_path, chat_template="old", bos_token={"content": "<|start|>"})
    (tmp_path / "chat_template.jinja").write_text(
        "{{ bos_token }}{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}{{ strftime_now('%Y') | length }}"
    )
    tokenizer = TokenizerDir.open(tmp_path)
    assert tokenizer.render_prompt([Message("user", "a"), Message("user", "b")]) == "<|start|>b4"


def test_text_parts_reach_a_template_as_one_string_and_images_as_parts(tmp_path: Path) -> None:
    tokenizer = TokenizerDir.open(
        save_byte_level(tmp_path, chat_template="{{ messages[0].content | tojson }}")
    )
    assert tokenizer.render_prompt([Message("user", "ab", parts=("a", "b"))]) == '"ab"'
    image = Media("image", "d", url="http://x/y.png")
    assert "http://x/y.png" in tokenizer.render_prompt([Message("user", "a", parts=("a", image))])


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% if %}", "chat template 'default'"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ 1 + 'a' }}", "unsupported operand"),
    ],
)
def test_a_template_that_fails_says_so_with_its_directory(
    tmp_path: Path, template: str, problem: str
) -> None:
    tokenizer = TokenizerDir.open(save_byte_level(tmp_path, chat_template=template))
    with pytest.raises(CodecError, match=problem) as error:
        tokenizer.encode_prompt([Message("user", "hi")])
    assert str(tmp_path) in str(error.value)


def test_without_a_template_a_prompt_is_lines_of_roles(tmp_path: Path) -> None:
    tokenizer = TokenizerDir.open(save_byte_level(tmp_path))
    assert tokenizer.decode(tokenizer.encode_prompt([Message("user", "hi")])) == "user: hi\nassistant: "
    with pytest.raises(CodecError, match="it has none"):
        tokenizer.render_prompt([Message("user", "hi")])


def test_an_output_is_its_text_and_its_calls_as_lines_of_json(tokenizer: TokenizerDir) -> None:
    calls = (ToolCall("f", '{"a": 1}'), ToolCall("g", "not json"))
    said = tokenizer.decode(tokenizer.encode_reply(Message("assistant", "hello", tool_calls=calls)))
    assert said == 'hello\n{"name":"f","arguments":{"a":1}}\n{"name":"g","arguments":"not json"}'


# Files


def test_a_missing_directory_or_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CodecError, match="nowhere: not a directory"):
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


@pytest.mark.parametrize("package", ["tokenizers", "jinja2"])
def test_a_missing_package_is_named_with_how_to_get_it(
    directory: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(CodecError, match=r"pip install 'branchline\[tokenizer\]'"):
        TokenizerDir.open(directory).render_prompt([Message("user", "hi")])


def test_ids_come_as_read_only_int32(tokenizer: TokenizerDir) -> None:
    ids = tokenizer.encode("hello")
    assert ids.dtype == np.int32
    assert not ids.flags.writeable
