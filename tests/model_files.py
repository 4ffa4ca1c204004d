"""Small model files and models for tests: safetensors and GGUF bytes, a random Llama."""

import json
import struct

import numpy as np

import eggpu as eg
from eggpu.importers.tensors import PLAIN, Tensor, Weights
from eggpu.models.llama import LayerSettings, Settings, build
from eggpu.models.rotary import rotary

KINDS = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q8_0": 8, "I32": 26, "BF16": 30}


def safetensors_bytes(tensors, header=None):
    """A file of arrays: {name: (dtype, array)}; `header` replaces the one that fits."""
    entries, data = {}, b""
    for name, (dtype, values) in tensors.items():
        raw = np.ascontiguousarray(values).tobytes()
        span = [len(data), len(data) + len(raw)]
        entries[name] = {"dtype": dtype, "shape": list(values.shape), "data_offsets": span}
        data += raw
    text = json.dumps(entries if header is None else header).encode()
    return struct.pack("<Q", len(text)) + text + data


def _text(value):
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(value):
    match value:
        case bool():
            return struct.pack("<I?", 7, value)
        case int():
            return struct.pack("<II", 4, value)
        case float():
            return struct.pack("<If", 6, value)
        case str():
            return struct.pack("<I", 8) + _text(value)
        case list():
            strings = bool(value) and isinstance(value[0], str)
            items = (
                b"".join(map(_text, value)) if strings else struct.pack(f"<{len(value)}i", *value)
            )
            return struct.pack("<IIQ", 9, 8 if strings else 5, len(value)) + items
    raise TypeError(type(value))


def gguf_bytes(metadata, tensors, version=3, alignment=32):
    """A file of {name: (format, shape, bytes)}."""
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    head += b"".join(_text(k) + _value(v) for k, v in metadata.items())
    data = b""
    for name, (kind, shape, raw) in tensors.items():
        data += bytes(-len(data) % alignment)
        dims = struct.pack(f"<I{len(shape)}Q", len(shape), *shape[::-1])
        head += _text(name) + dims + struct.pack("<IQ", KINDS[kind], len(data))
        data += raw
    return head + bytes(-len(head) % alignment) + data


class Given(Tensor):
    """A tensor that is there already."""

    __slots__ = ("values",)

    def __init__(self, name, values):
        super().__init__(name, values.shape, "F32", None, 0, values.nbytes)
        object.__setattr__(self, "values", values)

    def numpy(self):
        return self.values


assert "F32" in PLAIN


def tiny_settings(layers=2, window=0, context=64, heads=4, kv_heads=2, vocab=50):
    """Settings of a small Llama; with a window in every second layer."""
    turn = rotary(8, 10000.0)
    own = tuple(LayerSettings(window if k % 2 == 0 else 0, turn) for k in range(layers))
    return Settings(
        vocab=vocab, width=32, hidden=48, heads=heads, kv_heads=kv_heads, head_size=8, eps=1e-6,
        context=context, layers=own, scale=8**-0.5,
    )  # fmt: skip


def tiny_llama(seed=0, **changes):
    """A small Llama of random weights."""
    s = tiny_settings(**changes)
    rng = np.random.default_rng(seed)
    wide, narrow = s.heads * s.head_size, s.kv_heads * s.head_size
    shapes = {"embed_tokens": (s.vocab, s.width), "norm": (s.width,)}
    for k in range(len(s.layers)):
        at = f"layers.{k}."
        shapes |= {
            f"{at}input_layernorm": (s.width,), f"{at}post_attention_layernorm": (s.width,),
            f"{at}self_attn.q_proj": (wide, s.width), f"{at}self_attn.k_proj": (narrow, s.width),
            f"{at}self_attn.v_proj": (narrow, s.width), f"{at}self_attn.o_proj": (s.width, wide),
            f"{at}mlp.gate_proj": (s.hidden, s.width), f"{at}mlp.up_proj": (s.hidden, s.width),
            f"{at}mlp.down_proj": (s.width, s.hidden),
        }  # fmt: skip
    made = {}
    for name, shape in shapes.items():
        spread = 0.3 * rng.normal(size=shape) + (len(shape) == 1)
        made[f"{name}.weight"] = Given(name, spread.astype(np.float32))
    return build(s, Weights(made, "tiny"))


def full_logits(model, tokens):
    """Logits of all positions without a cache, (batch, t, vocab)."""
    return eg.compile(lambda m, t: m(t))(model, np.asarray(tokens, np.int32)).numpy()


TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def tiny_folder(path, seed=0, context=96, ends=True):
    """A folder as of Hugging Face: a small random Llama whose tokens are printable characters; with
    `ends` false none of them ends a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = ["\u0120" if c == 32 else chr(c) for c in range(32, 127)]
    tokens = ["<s>", "</s>", *letters]
    inner = Tokenizer(models.BPE(vocab={t: k for k, t in enumerate(tokens)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<s>", "</s>"])
    path.mkdir(parents=True, exist_ok=True)
    inner.save(str(path / "tokenizer.json"))
    config = {
        "model_type": "llama", "vocab_size": len(tokens), "hidden_size": 32,
        "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": context, "hidden_act": "silu",
        "rms_norm_eps": 1e-6, "eos_token_id": 1, "bos_token_id": 0,
    }  # fmt: skip
    config |= {} if ends else {"eos_token_id": None}
    (path / "config.json").write_text(json.dumps(config))
    settings = {"chat_template": TEMPLATE, "bos_token": "<s>", "eos_token": "</s>"}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    rng = np.random.default_rng(seed)
    shapes = {
        "embed_tokens": (len(tokens), 32), "norm": (32,),
        **{
            f"layers.{k}.{name}": shape
            for k in range(2)
            for name, shape in {
                "input_layernorm": (32,), "post_attention_layernorm": (32,),
                "self_attn.q_proj": (32, 32), "self_attn.k_proj": (16, 32),
                "self_attn.v_proj": (16, 32), "self_attn.o_proj": (32, 32),
                "mlp.gate_proj": (48, 32), "mlp.up_proj": (48, 32), "mlp.down_proj": (32, 48),
            }.items()
        },
    }  # fmt: skip
    made = {
        f"model.{name}.weight": (
            "F32", (0.3 * rng.normal(size=shape) + (len(shape) == 1)).astype(np.float32)
        )
        for name, shape in shapes.items()
    }  # fmt: skip
    (path / "model.safetensors").write_bytes(safetensors_bytes(made))
    return path
