"""The Llama family: Llama, Mistral, SmolLM2, Qwen2, Qwen3, Gemma 1 to 3 (text) and Phi-3.

One decoder whose settings and optional layers tell the members apart: windows, biases, norms of
heads, soft caps, norms after a block, scaled embeddings, rotary scalings.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import eggpu as eg
from eggpu.compiler.tracing import Array
from eggpu.importers.tensors import Weights
from eggpu.models.attention import join_heads, split_heads
from eggpu.models.cache import Cache, Place, attend, visible, written
from eggpu.models.layers import (
    Projection,
    RMSNorm,
    Table,
    activation,
    projection,
    rms_norm,
    split,
    table,
)
from eggpu.models.rotary import Rotary


@dataclass(frozen=True)
class LayerSettings:
    """What may differ between layers: the window (0: none) and the rotary positions."""

    window: int
    rotary: Rotary


@dataclass(frozen=True)
class Settings:
    """Sizes and choices of a model, from config.json or a GGUF file."""

    vocab: int
    width: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    eps: float
    context: int
    layers: tuple[LayerSettings, ...]
    scale: float
    activation: str = "silu"
    softcap: float = 0.0  # of attention scores
    final_softcap: float = 0.0  # of logits
    embedding_scale: float = 1.0
    norm_offset: float = 0.0  # added to the norms' weights
    residual_norms: bool = False  # norms of what attention and feed-forward give (Gemma 2 and 3)


@dataclass(frozen=True)
class Layer:
    """Attention with grouped heads, then a gated feed-forward, each on a norm of the residual."""

    norm1: RMSNorm
    query: Projection
    key: Projection
    value: Projection
    query_norm: RMSNorm | None
    key_norm: RMSNorm | None
    output: Projection
    output_norm: RMSNorm | None
    norm2: RMSNorm
    gate: Projection
    up: Projection
    down: Projection
    down_norm: RMSNorm | None

    def heads(
        self, x: Array, s: Settings, turn: Rotary, angles: tuple[Array, Array]
    ) -> tuple[Array, Array, Array]:
        """Queries, keys and values (batch, heads, t, head size), positions turned in."""
        h = self.norm1(x)
        q = split_heads(self.query(h), s.heads)
        k, v = (split_heads(p(h), s.kv_heads) for p in (self.key, self.value))
        q = q if self.query_norm is None else self.query_norm(q)
        k = k if self.key_norm is None else self.key_norm(k)
        return turn.turn(q, angles), turn.turn(k, angles), v

    def rest(self, x: Array, heads: Array, s: Settings) -> Array:
        """The residual after attention and feed-forward."""
        out = self.output(join_heads(heads))
        x = x + (out if self.output_norm is None else self.output_norm(out))
        h = self.norm2(x)
        out = self.down(activation(s.activation)(self.gate(h)) * self.up(h))
        return x + (out if self.down_norm is None else self.down_norm(out))


@dataclass(frozen=True)
class Llama:
    """tokens (batch, t) -> logits (batch, t, vocab)."""

    embedding: Table
    layers: tuple[Layer, ...]
    norm: RMSNorm
    head: Projection | None  # none: the embedding's table
    settings: Settings = field(metadata={"static": True})

    def __call__(self, tokens: Array) -> Array:
        """Logits of every position, without a cache."""
        s, count = self.settings, tokens.shape[1]
        x = self._embed(tokens)
        known = _Angles(eg.arange(count).reshape((1, 1, count)))
        for layer, own in zip(self.layers, s.layers, strict=True):
            q, k, v = layer.heads(x, s, own.rotary, known(own.rotary))
            options = {"scale": s.scale, "softcap": s.softcap, "window": own.window}
            x = layer.rest(x, attend(q, k, v, None, causal=True, **options), s)
        return self.logits(self.norm(x))

    def step(self, tokens: Array, cache: Cache, place: Place) -> tuple[Array, Cache]:
        """Hidden values (batch, t, width) of new tokens after those in the cache, and the next
        cache."""
        s, count = self.settings, tokens.shape[1]
        x = self._embed(tokens)
        known = _Angles(place.positions(count).reshape((-1, 1, count)))
        masks = {w: visible(place, count, cache.context, w) for w in {o.window for o in s.layers}}
        keys, values = [], []
        for number, (layer, own) in enumerate(zip(self.layers, s.layers, strict=True)):
            q, k, v = layer.heads(x, s, own.rotary, known(own.rotary))
            held_k, held_v = cache.layer(number)
            keys.append(written(held_k, k, place))
            values.append(written(held_v, v, place))
            k, v = place.held(keys[-1]), place.held(values[-1])
            heads = attend(q, k, v, masks[own.window], scale=s.scale, softcap=s.softcap)
            x = layer.rest(x, heads, s)
        return self.norm(x), Cache(tuple(keys), tuple(values))

    def logits(self, hidden: Array) -> Array:
        """Scores of all tokens for hidden values (..., width)."""
        out = self.embedding.attend(hidden) if self.head is None else self.head(hidden)
        cap = self.settings.final_softcap
        return eg.tanh(out * (1 / cap)) * cap if cap else out

    def _embed(self, tokens: Array) -> Array:
        x = self.embedding(tokens)
        return x if self.settings.embedding_scale == 1.0 else x * self.settings.embedding_scale


class _Angles:
    """The angles of each kind of rotary positions, traced once."""

    def __init__(self, positions: Array) -> None:
        self.positions = positions
        self.made: dict[Rotary, tuple[Array, Array]] = {}

    def __call__(self, rotary: Rotary) -> tuple[Array, Array]:
        if rotary not in self.made:
            self.made[rotary] = rotary.angles(self.positions)
        return self.made[rotary]


def build(s: Settings, w: Weights) -> Llama:
    """The model of settings and weights, by Hugging Face's names."""
    w = w.renamed(lambda name: name.removeprefix("model."))
    layers = tuple(_layer(s, w, f"layers.{k}.") for k in range(len(s.layers)))
    head = projection(w, "lm_head", s.vocab, s.width) if "lm_head.weight" in w else None
    norm = rms_norm(w, "norm", s.width, s.eps, s.norm_offset)
    return Llama(table(w, "embed_tokens", s.vocab, s.width), layers, norm, head, s)


def _layer(s: Settings, w: Weights, at: str) -> Layer:
    def norm(name: str, size: int = s.width) -> RMSNorm:
        return rms_norm(w, at + name, size, s.eps, s.norm_offset)

    def head_norm(name: str) -> RMSNorm | None:
        name = f"self_attn.{name}"
        return norm(name, s.head_size) if f"{at}{name}.weight" in w else None

    wide, narrow = s.heads * s.head_size, s.kv_heads * s.head_size
    if f"{at}self_attn.qkv_proj.weight" in w:
        fused = projection(w, f"{at}self_attn.qkv_proj", wide + 2 * narrow, s.width)
        q, k, v = split(fused, (wide, narrow, narrow))
    else:
        sizes = {"q": wide, "k": narrow, "v": narrow}
        q, k, v = (projection(w, f"{at}self_attn.{n}_proj", m, s.width) for n, m in sizes.items())
    if f"{at}mlp.gate_up_proj.weight" in w:
        fused = projection(w, f"{at}mlp.gate_up_proj", 2 * s.hidden, s.width)
        gate, up = split(fused, (s.hidden, s.hidden))
    else:
        gate, up = (projection(w, f"{at}mlp.{n}_proj", s.hidden, s.width) for n in ("gate", "up"))
    after = s.residual_norms
    return Layer(
        norm1=norm("input_layernorm"), query=q, key=k, value=v,
        query_norm=head_norm("q_norm"), key_norm=head_norm("k_norm"),
        output=projection(w, f"{at}self_attn.o_proj", s.width, wide),
        output_norm=norm("post_attention_layernorm") if after else None,
        norm2=norm("pre_feedforward_layernorm" if after else "post_attention_layernorm"),
        gate=gate, up=up, down=projection(w, f"{at}mlp.down_proj", s.width, s.hidden),
        down_norm=norm("post_feedforward_layernorm") if after else None,
    )  # fmt: skip


def default_scale(head_size: int) -> float:
    """1 / sqrt(head size)."""
    return 1 / math.sqrt(head_size)
