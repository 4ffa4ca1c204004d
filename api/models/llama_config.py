"""Settings of the Llama family from config.json and from a GGUF file's metadata."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from eggpu.importers.gguf_file import GGUF
from eggpu.importers.tensors import ModelFileError, Weights
from eggpu.models.config import Config
from eggpu.models.layers import known_activation
from eggpu.models.llama import LayerSettings, Llama, Settings, build, default_scale
from eggpu.models.rotary import rotary

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3")
GGUF_ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "phi3")
_GEMMA = ("gemma", "gemma2", "gemma3_text", "gemma3")
_GEMMA_27B = (("gemma2", 46), ("gemma3", 62))  # whose files do not say how scores are scaled


def from_config(values: Mapping[str, Any], w: Weights, context: int | None = None) -> Llama:
    """The model of a Hugging Face folder. `context` is how far it will be used (for scalings)."""
    where = f"{w.where}: config.json"
    return build(_useful(where, lambda: settings(Config(values, where), context)), w)


def _useful(where: str, read: Callable[[], Settings]) -> Settings:
    """What `read` gives; a ModelFileError for any value that it cannot use."""
    try:
        return read()
    except ModelFileError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ModelFileError(f"{where} has a value of no use: {error}") from error


def settings(c: Config, context: int | None = None) -> Settings:
    """Settings of a config.json."""
    kind = c.need("model_type")
    heads, width = c.size("num_attention_heads"), c.size("hidden_size")
    head_size = c.size("head_dim", width // heads)
    gemma = kind in _GEMMA
    scalar = c.number("query_pre_attn_scalar", head_size)
    return Settings(
        vocab=c.size("vocab_size"), width=width, hidden=c.size("intermediate_size"), heads=heads,
        kv_heads=c.size("num_key_value_heads", heads), head_size=head_size,
        eps=c.number("rms_norm_eps", 1e-6), context=c.size("max_position_embeddings", 2048),
        layers=_layers(c, kind, head_size, context), scale=1 / math.sqrt(scalar),
        activation=_activation(c), softcap=c.number("attn_logit_softcapping", 0.0),
        final_softcap=c.number("final_logit_softcapping", 0.0),
        embedding_scale=math.sqrt(width) if gemma else 1.0, norm_offset=1.0 if gemma else 0.0,
        residual_norms=kind in ("gemma2", "gemma3_text"),
    )  # fmt: skip


def _activation(c: Config) -> str:
    kind = c.get("model_type", "")
    name = c.get("hidden_activation") or c.need("hidden_act")
    return known_activation("gelu_pytorch_tanh" if kind in _GEMMA and name == "gelu" else name)


def _layers(c: Config, kind: str, head_size: int, used: int | None) -> tuple[LayerSettings, ...]:
    count = c.layers("num_hidden_layers")
    window = c.size("sliding_window") if c.get("sliding_window") else 0
    return tuple(
        LayerSettings(
            window if sliding else 0,
            _rotary(c, kind, head_size, "sliding_attention" if sliding else "full_attention", used),
        )
        for sliding in _sliding(c, kind, count, window)
    )


def _sliding(c: Config, kind: str, count: int, window: int) -> list[bool]:
    """Which layers have the window."""
    types = c.get("layer_types")
    if not window:
        return [False] * count
    if types:
        if not isinstance(types, list) or len(types) != count:
            raise ModelFileError(f"{c.where} needs {count} layer_types")
        return [t == "sliding_attention" for t in types]
    match kind:
        case "gemma2":
            return [k % 2 == 0 for k in range(count)]
        case "gemma3_text":
            every = c.size("sliding_window_pattern", 6)
            return [(k + 1) % every != 0 for k in range(count)]
        case "qwen2" | "qwen3":
            from_ = c.size("max_window_layers", count) if c.get("use_sliding_window") else count
            return [k >= from_ for k in range(count)]
        case "mistral" | "phi3":
            return [True] * count
        case _:
            return [False] * count


def _rotary(c: Config, kind: str, head_size: int, layer: str, used: int | None):  # noqa: ANN202
    given = c.get("rope_parameters") or {}
    given = given.get(layer, given)
    scaling = given or c.get("rope_scaling") or {}
    if not isinstance(scaling, Mapping):
        raise ModelFileError(f"{c.where} needs an object as rope_scaling")
    base = float(scaling.get("rope_theta") or c.get("rope_theta") or 10000.0)
    if kind == "gemma3_text" and not given and layer == "sliding_attention":
        base, scaling = c.number("rope_local_base_freq", 10000.0), {}
    part = float(scaling.get("partial_rotary_factor") or c.get("partial_rotary_factor") or 1.0)
    context = c.size("max_position_embeddings", 2048)
    original = c.get("original_max_position_embeddings")
    original = int(scaling.get("original_max_position_embeddings") or original or context)
    size = int(head_size * part)
    if size > head_size:
        raise ModelFileError(f"{c.where} turns {size} elements of heads of {head_size}")
    try:
        scaling = {**scaling, "original_max_position_embeddings": original}
        return rotary(size, base, scaling, used=used or 0, most=context, original=original)
    except (KeyError, TypeError, ValueError) as error:
        raise ModelFileError(f"{c.where}: rope_scaling is incomplete: {error!r}") from None


# ---- GGUF

_GGUF_NAMES = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj", "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}  # fmt: skip
_GGUF_TOP = {"token_embd": "embed_tokens", "output_norm": "norm", "output": "lm_head"}


def _hugging_face_name(architecture: str) -> Callable[[str], str]:
    names = dict(_GGUF_NAMES)
    if architecture in ("gemma2", "gemma3"):
        names["ffn_norm"] = "pre_feedforward_layernorm"
    if architecture == "phi3":
        names["ffn_up"] = "mlp.gate_up_proj"

    def new_name(name: str) -> str:
        if found := re.fullmatch(r"blk\.(\d+)\.(\w+)\.(\w+)", name):
            layer, part, end = found.groups()
            return f"layers.{layer}.{names.get(part, part)}.{end}"
        part, _, end = name.rpartition(".")
        return f"{_GGUF_TOP.get(part, part)}.{end}"

    return new_name


def from_gguf(file: GGUF) -> Llama:
    """The model of a GGUF file."""
    arch = file.architecture
    prefix = f"{arch}."
    values = {k.removeprefix(prefix): v for k, v in file.metadata.items() if k.startswith(prefix)}
    c = Config(values, str(file.path))
    w = file.weights.renamed(_hugging_face_name(arch))
    vocab = [*w["embed_tokens.weight"].shape, 0][0]
    return build(_useful(c.where, lambda: _gguf_settings(c, arch, vocab)), w)


def _gguf_settings(c: Config, arch: str, vocab: int) -> Settings:
    heads, width = c.size("attention.head_count"), c.size("embedding_length")
    head_size = c.size("attention.key_length", width // heads)
    gemma = arch in _GEMMA
    count = c.layers("block_count")
    window = int(c.number("attention.sliding_window", 0))
    scaling = _gguf_scaling(c)
    size = c.size("rope.dimension_count", head_size)
    if size > head_size:
        raise ModelFileError(f"{c.where} turns {size} elements of heads of {head_size}")
    # files of the architecture llama have the rows of queries and keys in neighboring pairs
    interleaved = arch == "llama"
    turn = rotary(size, c.number("rope.freq_base", 10000.0), scaling, interleaved=interleaved)
    local = rotary(size, 10000.0) if arch == "gemma3" else turn
    kind = {"gemma3": "gemma3_text"}.get(arch, arch)
    sliding = _sliding(Config({}, c.where), kind, count, window)
    return Settings(
        vocab=vocab, width=width, hidden=c.size("feed_forward_length"), heads=heads,
        kv_heads=c.size("attention.head_count_kv", heads), head_size=head_size,
        eps=c.number("attention.layer_norm_rms_epsilon", 1e-6),
        context=c.size("context_length", 2048),
        layers=tuple(LayerSettings(window if s else 0, local if s else turn) for s in sliding),
        scale=default_scale(width // heads if (arch, count) in _GEMMA_27B else head_size),
        activation="gelu_pytorch_tanh" if gemma else "silu",
        softcap=c.number("attn_logit_softcapping", 0.0),
        final_softcap=c.number("final_logit_softcapping", 0.0),
        embedding_scale=math.sqrt(width) if gemma else 1.0,
        residual_norms=arch in ("gemma2", "gemma3"),
    )  # fmt: skip


def _gguf_scaling(c: Config) -> dict[str, Any]:
    kind = c.get("rope.scaling.type", "none")
    if kind in ("none", None):
        return {}
    return {
        "rope_type": kind,
        "factor": c.number("rope.scaling.factor", 1.0),
        "original_max_position_embeddings": c.size(
            "rope.scaling.original_context_length", c.size("context_length", 2048)
        ),
    }
