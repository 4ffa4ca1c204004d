"""GGUF files of each architecture, named as by the package gguf, give what the folder gives."""

import json

import gguf
import numpy as np
import pytest
from model_files import safetensors_bytes

from eggpu.compiler.tracing import array
from eggpu.models.auto import load_model

WIDTH, HIDDEN, HEADS, KV, SIZE, VOCAB, LAYERS = 16, 24, 4, 2, 8, 40, 3
IDS = np.random.default_rng(0).integers(0, VOCAB, (1, 9)).astype(np.int32)
BASE = {
    "vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": HIDDEN, "head_dim": SIZE,
    "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 5000.0,
    "hidden_act": "silu",
}  # fmt: skip
GELU = {"hidden_activation": "gelu_pytorch_tanh"}
WINDOW = {"sliding_window": 4, "query_pre_attn_scalar": SIZE}
# model_type: (architecture in GGUF, settings besides BASE)
MODELS = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {"bias": True}),
    "qwen3": ("qwen3", {"head_norms": True}),
    "gemma": ("gemma", GELU),
    "gemma2": (
        "gemma2",
        {
            **WINDOW,
            **GELU,
            "after": True,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 2.0,
        },
    ),
    "gemma3_text": (
        "gemma3",
        {**WINDOW, **GELU, "after": True, "head_norms": True, "rope_local_base_freq": 10000.0},
    ),
    "phi3": ("phi3", {**WINDOW, "fused": True}),
}


def shapes(options):
    """The tensors of a model by Hugging Face's names."""
    wide, narrow = HEADS * SIZE, KV * SIZE
    out = {"embed_tokens.weight": (VOCAB, WIDTH), "norm.weight": (WIDTH,)}
    for k in range(LAYERS):
        layer = {
            "input_layernorm.weight": (WIDTH,),
            "post_attention_layernorm.weight": (WIDTH,),
            "self_attn.o_proj.weight": (WIDTH, wide),
            "mlp.down_proj.weight": (WIDTH, HIDDEN),
        }
        if options.get("fused"):
            layer["self_attn.qkv_proj.weight"] = (wide + 2 * narrow, WIDTH)
            layer["mlp.gate_up_proj.weight"] = (2 * HIDDEN, WIDTH)
        else:
            for name, rows in (("q", wide), ("k", narrow), ("v", narrow)):
                layer[f"self_attn.{name}_proj.weight"] = (rows, WIDTH)
                if options.get("bias"):
                    layer[f"self_attn.{name}_proj.bias"] = (rows,)
            layer |= {f"mlp.{n}_proj.weight": (HIDDEN, WIDTH) for n in ("gate", "up")}
        if options.get("head_norms"):
            layer |= {f"self_attn.{n}_norm.weight": (SIZE,) for n in ("q", "k")}
        if options.get("after"):
            layer |= {f"{n}_feedforward_layernorm.weight": (WIDTH,) for n in ("pre", "post")}
        out |= {f"layers.{k}.{name}": shape for name, shape in layer.items()}
    return {f"model.{name}": shape for name, shape in out.items()}


def pairs_apart(weight, heads):
    """Rows of queries or keys as llama.cpp's converter orders them: pairs side by side."""
    rows = weight.reshape(heads, 2, SIZE // 2, -1)
    return rows.swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path, architecture, config, tensors):
    """The file that llama.cpp's converter would write."""
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV)
    writer.add_key_length(SIZE)
    writer.add_value_length(SIZE)
    writer.add_rope_dimension_count(SIZE)
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if "sliding_window" in config:
        writer.add_sliding_window(config["sliding_window"])
    if "attn_logit_softcapping" in config:
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    kind = next(k for k, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, LAYERS)
    for name, values in tensors.items():
        if architecture == "llama" and ".q_proj" in name:
            values = pairs_apart(values, HEADS)
        if architecture == "llama" and ".k_proj" in name:
            values = pairs_apart(values, KV)
        if architecture.startswith("gemma") and "norm" in name:
            values = values + 1
        new = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert new, name
        writer.add_tensor(new, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("kind", MODELS)
def test_a_file_gives_what_the_folder_gives(tmp_path, kind):
    architecture, options = MODELS[kind]
    own = ("bias", "head_norms", "after", "fused")
    config = BASE | {k: v for k, v in options.items() if k not in own} | {"model_type": kind}
    rng = np.random.default_rng(1)
    tensors = {
        name: (0.3 * rng.normal(size=shape) + ("norm" in name)).astype(np.float32)
        for name, shape in shapes(options).items()
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    data = safetensors_bytes({name: ("F32", values) for name, values in tensors.items()})
    (tmp_path / "model.safetensors").write_bytes(data)
    write_gguf(tmp_path / "model.gguf", architecture, config, tensors)
    want = load_model(tmp_path)(array(IDS)).numpy()  # computed by NumPy
    got = load_model(tmp_path / "model.gguf")(array(IDS)).numpy()
    np.testing.assert_allclose(got, want, atol=1e-5)
    assert np.abs(want).max() > 0.1
