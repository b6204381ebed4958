"""A tiny llama model with a byte vocabulary, as a GGUF file in the layout of llama.cpp."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

HEADS, KEY_HEADS, HEAD, INNER, LAYERS = 4, 2, 8, 64, 2
SIZE = HEADS * HEAD
CONTEXT = 128
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONTROLS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["Ċ Ċ", "Ġ Ġ", "h i", "Ġ hi", "1 2"]
BYTES = [chr(c) for c in [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100), *range(0x100, 0x144)]]
TOKENS = [*CONTROLS, *BYTES, *(merge.replace(" ", "") for merge in MERGES)]

NAMES = {
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def draw_weights() -> dict[str, Any]:
    """The weights by their transformers names; 8-bit quantization preserves them exactly."""
    rng = np.random.default_rng(0)

    def table(rows: int, columns: int) -> Any:
        # Each block of 32 has the maximum of 127 halves, so that 8 bits represent every value.
        halves = rng.integers(-126, 127, (rows, columns))
        halves[:, ::32] = 127
        return (halves / 2).astype(np.float32)

    keys = KEY_HEADS * HEAD
    weights = {"model.embed_tokens.weight": table(len(TOKENS), SIZE)}
    for layer in range(LAYERS):
        shapes = {
            "self_attn.q_proj": (SIZE, SIZE),
            "self_attn.k_proj": (keys, SIZE),
            "self_attn.v_proj": (keys, SIZE),
            "self_attn.o_proj": (SIZE, SIZE),
            "mlp.gate_proj": (INNER, SIZE),
            "mlp.up_proj": (INNER, SIZE),
            "mlp.down_proj": (SIZE, INNER),
        }
        weights |= {f"model.layers.{layer}.{name}.weight": table(*shape) for name, shape in shapes.items()}
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"model.layers.{layer}.{norm}.weight"] = rng.random(SIZE, np.float32)
    return weights | {"model.norm.weight": rng.random(SIZE, np.float32)}


def write_gguf(file: Path, weights: dict[str, Any], pre: str = "smollm") -> Path:
    """Writes the model as a GGUF file, as llama.cpp does."""
    from gguf import GGMLQuantizationType, GGUFWriter
    from gguf.quants import quantize

    writer = GGUFWriter(file, "llama")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(SIZE)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KEY_HEADS)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3 if token in CONTROLS else 1 for token in TOKENS])
    writer.add_token_merges(MERGES)
    for name, token_id in (("bos", 1), ("eos", 2), ("pad", 2), ("unk", 0)):
        getattr(writer, f"add_{name}_token_id")(token_id)
    writer.add_chat_template(TEMPLATE)
    for name, weight in weights.items():
        own = name.removeprefix("model.").removesuffix(".weight")
        layer = ""
        if own.startswith("layers."):
            _, number, own = own.split(".", 2)
            layer = f"blk.{number}."
        heads = {"self_attn.q_proj": HEADS, "self_attn.k_proj": KEY_HEADS}.get(own)
        if heads:
            rows, columns = weight.shape
            weight = (
                weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)
            )
        kind = GGMLQuantizationType.Q8_0 if weight.ndim == 2 else GGMLQuantizationType.F32
        writer.add_tensor(f"{layer}{NAMES[own]}.weight", quantize(weight, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file
