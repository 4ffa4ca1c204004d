"""The plan of one token: few kernels a layer, caches in place, packed weights read as such."""

import dataclasses
import sys
from pathlib import Path

import numpy as np
import pytest

import eggpu as eg
from eggpu.compiler.tracing import array
from eggpu.generate import Generator, Sampling
from eggpu.importers.packed import pack
from eggpu.models.layers import Projection
from eggpu.models.llama import Llama

sys.path.insert(0, str(Path(__file__).parent))
from model_files import tiny_llama

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
CONTEXT = 64
MOST_A_LAYER = 7


def packed(model: Llama, format_: str = "Q8_0") -> Llama:
    """The model with its projections quantized, where rows are whole blocks."""
    gguf = pytest.importorskip("gguf")

    def layer(one):
        changes = {}
        for f in dataclasses.fields(one):
            held = getattr(one, f.name)
            if isinstance(held, Projection) and held.weight.shape[1] % 32 == 0:
                values = np.array(held.weight.numpy())
                raw = gguf.quants.quantize(values, gguf.GGMLQuantizationType[format_])
                changes[f.name] = Projection(pack(raw, format_, values.shape), held.bias)
        return dataclasses.replace(one, **changes)

    return dataclasses.replace(model, layers=tuple(map(layer, model.layers)))


def submits_of_a_read():
    """Submits of reading 4 bytes back, where memory cannot be mapped."""
    value = eg.put(np.int32(1))
    before = eg.device().counters.submits
    value.numpy()
    return eg.device().counters.submits - before


def plan_of(model, **options):
    """The plan of a token, after a few of them."""
    generator = Generator(model, context=CONTEXT, sizes=(1,), **options)
    session = generator.start([PROMPT] * generator.batch)
    session.next()
    return generator.advance.plan


@pytest.mark.parametrize("quantize", [False, True])
@pytest.mark.parametrize("window", [0, 16])
def test_dispatches_of_a_layer(quantize, window):
    """Norm and products are one kernel, so are the cache's windows, and what follows a product."""
    counts = {}
    for layers in (2, 6):
        model = tiny_llama(layers=layers, window=window)
        counts[layers] = len(plan_of(packed(model) if quantize else model).kernels)
    each = (counts[6] - counts[2]) / 4
    assert each <= MOST_A_LAYER, counts


@pytest.mark.parametrize("dtype", ["f32", "f16"])
@pytest.mark.parametrize("batch", [1, 3])
def test_caches_are_written_in_place(dtype, batch):
    model = tiny_llama(layers=2)
    if dtype == "f16" and "shader-f16" not in eg.device().target.features:
        pytest.skip("the device has no f16")
    plan = plan_of(model, batch=batch, cache_dtype=dtype)
    whole = {plan.buffers[b].nbytes for b in plan.inputs if "cache" in plan.buffers[b].name}
    writers = [k for k in plan.kernels if k.updates]
    assert len(whole) == 1, whole
    assert sum(len(k.updates) for k in writers) >= 2 * 2
    for kernel in plan.kernels:
        assert kernel.bytes_written < min(whole), f"{kernel.name} writes a whole cache"


@pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "top_k": 5, "seed": 3}])
def test_a_token_costs_one_submit_and_no_compilation(options):
    generator = Generator(packed(tiny_llama()), context=CONTEXT, sizes=(1, 16))
    session = generator.start([PROMPT], Sampling(**options))
    session.next()
    before, programs = eg.device().counters.copy(), generator.programs
    tokens = 12
    for _ in range(tokens):
        session.next()
    gained = eg.device().counters.since(before)
    assert gained["submits"] == tokens * (1 + submits_of_a_read())
    assert gained["download_bytes"] == 4 * tokens
    assert gained["dispatches"] == tokens * len(generator.advance.plan.kernels)
    for nothing in ("pipelines_compiled", "buffers_created"):
        assert nothing not in gained, gained
    assert generator.programs == programs


def test_packed_and_plain_weights_give_the_same_tokens():
    """Of quantized weights, and of the same weights dequantized first."""
    model = packed(tiny_llama(seed=2), "Q4_1")

    def plain(held):
        if isinstance(held, Projection) and not isinstance(held.weight, eg.Array):
            return Projection(array(eg.compile(lambda w: w.dequantize())(held.weight).numpy()))
        return held

    layers = tuple(
        dataclasses.replace(
            one, **{f.name: plain(getattr(one, f.name)) for f in dataclasses.fields(one)}
        )
        for one in model.layers
    )
    texts = []
    for each in (model, dataclasses.replace(model, layers=layers)):
        session = Generator(each, context=CONTEXT, sizes=(1, 16)).start([PROMPT])
        texts.append(list(session.tokens(12)))
    assert texts[0] == texts[1]
