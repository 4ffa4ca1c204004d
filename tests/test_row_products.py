"""Products with few rows: quantized and plain matrices are read once, whatever their format."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import eggpu as eg
from eggpu.compiler.schedule.target import LLVMPIPE
from eggpu.compiler.schedule.tile import candidates
from eggpu.compiler.schedule.tile_rows import ROWS
from eggpu.compiler.tracing import array
from eggpu.importers.formats import FORMATS
from eggpu.importers.packed import FLOATS, pack
from eggpu.models.layers import Projection

quants = pytest.importorskip("gguf.quants")
RNG = np.random.default_rng(0)


def quantized(format_: str, rows: int, columns: int) -> tuple[Any, np.ndarray]:
    """A matrix in a format, as the device holds it and as NumPy does."""
    import gguf

    kind = gguf.GGMLQuantizationType[format_]
    if format_.endswith("_K"):  # which gguf can only read: random bytes with finite scales
        size = gguf.GGML_QUANT_SIZES[kind][1] * (columns // 256)
        raw = RNG.integers(0, 256, (rows, size)).astype(np.uint8)
        with np.errstate(all="ignore"):
            values = quants.dequantize(raw, kind)
        bad = ~np.isfinite(values).all(1) | (np.abs(values).max(1) > 1e3)
        raw[bad] = 0
        return pack(raw, format_, (rows, columns)), quants.dequantize(raw, kind)
    raw = quants.quantize(RNG.normal(size=(rows, columns)).astype(np.float32), kind)
    return pack(raw, format_, (rows, columns)), quants.dequantize(raw, kind)


def checked(weight: Any, reference: np.ndarray, rows: int, **options: Any) -> Any:
    """The plan of x W^T + r, whose values are right."""
    outputs, inputs = reference.shape
    x = RNG.normal(size=(rows, inputs)).astype(np.float32)
    r = RNG.normal(size=(rows, outputs)).astype(np.float32)
    f = eg.compile(lambda p, x, r: p(x) + r, cache=False, **options)
    got = f(Projection(weight), x, r).numpy()
    want = x.astype(np.float64) @ reference.T.astype(np.float64) + r
    scale = np.abs(x).astype(np.float64) @ np.abs(reference.T).astype(np.float64)
    assert np.max(np.abs(got - want) / (scale + np.abs(r))) < 2e-6
    return f.plan


@pytest.mark.parametrize("format_", [*FORMATS, *FLOATS])
@pytest.mark.parametrize(("rows", "outputs", "blocks"), [(1, 64, 3), (1, 50, 1), (2, 33, 2)])
def test_packed_matrices(format_: str, rows: int, outputs: int, blocks: int) -> None:
    block = FORMATS[format_].block if format_ in FORMATS else 36
    weight, reference = quantized(format_, outputs, blocks * block)
    plan = checked(weight, reference, rows)
    assert len(plan.kernels) == 1, [k.name for k in plan.kernels]


@pytest.mark.parametrize("rows", [1, 2, 4, 7, 8])
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 64), (7, 4), (33, 100), (48, 2048)])
def test_plain_matrices(rows: int, outputs: int, inputs: int) -> None:
    matrix = RNG.normal(size=(outputs, inputs)).astype(np.float32)
    checked(array(matrix), matrix, rows)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 64), (100, 36), (2048, 8)])
def test_matrices_in_the_other_layout(rows: int, inputs: int, outputs: int) -> None:
    """Neighbouring columns lie together: an invocation has four of them."""
    x = RNG.normal(size=(2, rows, inputs)).astype(np.float32)
    w = RNG.normal(size=(2, inputs, outputs)).astype(np.float32)
    f = eg.compile(lambda x, w: eg.tanh(x @ w), cache=False)
    want = np.tanh(x.astype(np.float64) @ w)
    np.testing.assert_allclose(f(x, w).numpy(), want, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("columns", [1, 2])
def test_few_columns(columns: int) -> None:
    a = RNG.normal(size=(70, 96)).astype(np.float32)
    b = RNG.normal(size=(96, columns)).astype(np.float32)
    got = eg.compile(lambda a, b: a @ b, cache=False)(a, b).numpy()
    np.testing.assert_allclose(got, a.astype(np.float64) @ b, rtol=1e-4, atol=1e-4)


def test_a_row_times_a_packed_matrix_is_a_row_product() -> None:
    """One kernel reads words in fours and multiplies with a scale once a block."""
    weight, reference = quantized("Q4_1", 576, 576)
    (kernel,) = checked(weight, reference, 1).kernels
    assert kernel.template == ROWS
    assert kernel.wgsl.count("eg_half(") <= 2 + 2 * 2 * 8
    if eg.device().target.kind == "cpu":
        assert [b.access for b in kernel.bindings if b.image >= 0] == ["image4u", "image1u"]


def products(weight: Any, **options: Any) -> tuple[Any, Any]:
    """x W^T compiled, and the largest error of what it gives for weights in turn."""
    f = eg.compile(lambda p, x: p(x), cache=False, **options)

    def error(weight: Any, reference: np.ndarray) -> float:
        x = RNG.normal(size=(1, reference.shape[1])).astype(np.float32)
        got = f(Projection(weight), x).numpy()
        return float(np.max(np.abs(got - x.astype(np.float64) @ reference.T.astype(np.float64))))

    return f, error


def test_copies_of_weights_stay_while_the_same_arrays_are_given() -> None:
    first, second = (quantized("Q4_1", 96, 128) for _ in range(2))
    f, error = products(first[0])
    for weight, reference in (first, first, second, second, first):
        assert error(weight, reference) < 1e-4
    if eg.device().target.keeps:
        kept = [c for c in f.plan.copies if c.kept]
        assert [f.plan.buffers[c.buffer].dtype for c in kept] == ["u32", "u32"]
        assert len({c.image for c in kept}) == len(f.plan.images) == 2


def test_copies_of_weights_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from eggpu.runtime import native

    made: list[Any] = []
    copy = native.copy
    monkeypatch.setattr(native, "copy", lambda *given: (made.append(given), copy(*given)))
    weight, reference = quantized("Q8_0", 96, 128)
    _, error = products(weight)
    counts = []
    for _ in range(3):
        assert error(weight, reference) < 1e-4
        counts.append(len(made))
    again, reference = quantized("Q8_0", 96, 128)
    assert error(again, reference) < 1e-4
    if eg.device().target.keeps:
        assert counts[0] == counts[1] == counts[2] > 0
        assert len(made) == 2 * counts[0]


def test_weights_stay_in_buffers_within_a_limit_of_memory() -> None:
    weight, reference = quantized("Q4_1", 96, 128)
    f, error = products(weight, max_memory=1 << 30)
    assert error(weight, reference) < 1e-4
    assert not f.plan.images


def test_donated_weights_stay_in_buffers() -> None:
    weight, reference = quantized("Q4_1", 96, 512)
    x = RNG.normal(size=(1, 512)).astype(np.float32)
    f = eg.compile(lambda p, x: (p(x), p), cache=False, donate=("p",))
    got, _ = f(Projection(weight), x)
    np.testing.assert_allclose(got.numpy(), x.astype(np.float64) @ reference.T, atol=1e-3)
    assert not f.plan.images


@pytest.mark.parametrize("rows", [5, 12, 16, 17])
def test_more_rows_of_a_packed_matrix(rows: int) -> None:
    """Up to 8 rows the matrix stays packed; more are a matter of cost."""
    weight, reference = quantized("Q4_1", 200, 192)
    plan = checked(weight, reference, rows)
    if rows <= 8 and eg.device().target.kind == "cpu":
        assert [k.template for k in plan.kernels] == [ROWS]


def test_the_price_knows_how_much_is_read() -> None:
    packed = candidates(LLVMPIPE, 1, 1, 4096, 4096, "k", "k", 1, (1.0, 0.16))[0]
    plain = candidates(LLVMPIPE, 1, 1, 4096, 4096, "k", "k", 1, (1.0, 1.0))[0]
    assert packed.template == ROWS
    assert packed.efficiency > plain.efficiency
    many = candidates(LLVMPIPE, 1, 64, 4096, 4096, "k", "k", 1, (1.0, 0.16))[0]
    assert many.template != ROWS


def layer(x: Any, norm: Any, *projections: Any) -> Any:
    """Products of one normalized row: the square of the first gates the second."""
    h = x * eg.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5) * norm
    gate, up, *others = (p(h) for p in projections)
    return (gate * gate * up, *others)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("width", [64, 96, 36])
def test_products_of_a_normalized_row_are_one_kernel(rows: int, width: int) -> None:
    """The statistics of a row are computed by every workgroup, products share a kernel."""
    x = RNG.normal(size=(rows, width)).astype(np.float32)
    norm = RNG.normal(size=width).astype(np.float32)
    weights = [RNG.normal(size=(n, width)).astype(np.float32) for n in (256, 256, 64, 33)]
    f = eg.compile(layer, cache=False)
    got = f(x, norm, *(Projection(array(w)) for w in weights))
    wide = x.astype(np.float64)
    h = wide / np.sqrt((wide * wide).mean(-1, keepdims=True) + 1e-5) * norm
    a, b, c, d = (h @ w.T for w in weights)
    for one, want in zip(got, (a * a * b, c, d), strict=True):
        np.testing.assert_allclose(one.numpy(), want, rtol=2e-4, atol=2e-4 * np.abs(want).max())
    assert [k.template for k in f.plan.kernels] == [ROWS], [k.name for k in f.plan.kernels]


def test_layer_norm_before_products() -> None:
    """Two reductions, one after the other, of three rows with different values."""
    x = RNG.normal(size=(3, 128)).astype(np.float32) * np.array([[1], [10], [0.1]], np.float32)
    w = RNG.normal(size=(200, 128)).astype(np.float32)
    f = eg.compile(lambda x, p: p(eg.nn.layer_norm(x)), cache=False)
    got = f(x, Projection(array(w))).numpy()
    wide = x.astype(np.float64)
    h = (wide - wide.mean(-1, keepdims=True)) / np.sqrt(wide.var(-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(got, h @ w.T, rtol=1e-3, atol=1e-3)


def test_many_rows_keep_their_own_kernels() -> None:
    """With 64 rows the statistics are computed once."""
    x, norm = RNG.normal(size=(64, 64)).astype(np.float32), np.ones(64, np.float32)
    weights = [array(RNG.normal(size=(64, 64)).astype(np.float32)) for _ in range(2)]
    f = eg.compile(layer, cache=False)
    f(x, norm, *map(Projection, weights))
    assert all(k.template != ROWS for k in f.plan.kernels)
