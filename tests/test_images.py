"""Operands in images: how arrays lie there, when copies are made, what a plan must say, results."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import eggpu as eg
from eggpu.compiler.errors import IRError
from eggpu.compiler.library.attention import scaled_dot_product_attention
from eggpu.compiler.pipeline import compile_graph
from eggpu.compiler.schedule import images
from eggpu.compiler.schedule.images import LINE, TEXELS, image_for, row_width, with_images
from eggpu.compiler.schedule.plan import Copy, Plan
from eggpu.compiler.schedule.target import LLVMPIPE
from eggpu.compiler.schedule.verify import verify_plan
from eggpu.compiler.tracing import trace


def two_products() -> Plan:
    rng = np.random.default_rng(0)
    shapes = ((256, 256), (256, 256), (256, 256))
    arrays = [rng.standard_normal(s).astype(np.float32) for s in shapes]
    graph = trace(lambda x, v, w: eg.tanh(x @ v) @ w, *arrays)
    return compile_graph(graph, LLVMPIPE).plan


@pytest.mark.parametrize(
    ("shape", "element", "width"),
    [
        ((512, 128), "image4", 32), ((4, 64, 192), "image4", 48), ((300, 36), "image4", 1024),
        ((300, 35), "image1", 1024), ((512, 128), "image1", 1024), ((1 << 19, 64), "image4", 1024),
    ],
)  # fmt: skip
def test_rows_of_an_image_are_rows_of_the_array(
    shape: tuple[int, ...], element: str, width: int
) -> None:
    assert row_width(shape, element) == width
    image, texel = image_for(shape, element), TEXELS[element].nbytes
    assert image.width == width + LINE // texel
    assert max(image.width, image.rows) <= 16384
    assert width * image.rows * texel >= 4 * np.prod(shape)
    assert width * texel % 256 == 0  # what a copy of several rows needs


def test_copies_are_made_together_and_before_they_are_read() -> None:
    plan = two_products()
    names = [[plan.buffers[c.buffer].name for c in plan.copies if c.kernel == k] for k in (0, 1)]
    assert names == [["x", "v", "w"], ["t0"]]
    for kernel in plan.kernels:
        assert [b.access for b in kernel.bindings] == ["read_write", "image4", "image4"]
        assert "textureLoad" in kernel.wgsl
    verify_plan(plan, LLVMPIPE)
    first, last = plan.copies[0], plan.copies[-1]
    assert first.image == last.image  # x is not read again, so its image is free for t0
    assert len(plan.images) == 3
    assert plan.peak_bytes == sum(4 * 256 * 256 for _ in plan.buffers) + 3 * 16 * 68 * 256


def test_without_images_there_are_no_copies() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((256, 256)).astype(np.float32)
    plan = compile_graph(trace(lambda x: x @ x, x), replace(LLVMPIPE, images=False)).plan
    assert not plan.images
    assert not plan.copies
    assert "textureLoad" not in plan.kernels[0].wgsl


def _without_copy(plan: Plan) -> Plan:
    return replace(plan, copies=plan.copies[:-1])


def _early(plan: Plan) -> Plan:
    return replace(plan, copies=(replace(plan.copies[-1], kernel=0), *plan.copies[:-1]))


def _small(plan: Plan) -> Plan:
    return replace(plan, images=(replace(plan.images[0], rows=2), *plan.images[1:]))


def _unknown(plan: Plan) -> Plan:
    return replace(plan, copies=(*plan.copies, Copy(1, 0, 99, 64)))


def _kept(plan: Plan) -> Plan:
    return replace(plan, copies=(*plan.copies[:-1], replace(plan.copies[-1], kept=True)))


def _texel(plan: Plan) -> Plan:
    one = replace(plan.images[0], texel=4)
    return replace(plan, images=(one, *plan.images[1:]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_without_copy, r"kernel 1 .*: reads t0 from image \d, which holds another value"),
        (_early, r"kernel 0 .*: reads t0, but its bytes were never written"),
        (_small, r"kernel 0 .*: needs 256 rows of 64 for x, got 2 of 68"),
        (_unknown, r"kernel 1 .*: copies to image 99 of 3 images"),
        (_texel, r"kernel 0 .*: needs "),
        (_kept, r"kernel 1 .*: keeps a copy of t0, no argument of its own"),
    ],
)
def test_a_plan_with_wrong_copies_is_refused(change, message: str) -> None:
    with pytest.raises(IRError, match=message):
        verify_plan(change(two_products()), LLVMPIPE)


@pytest.mark.parametrize("transposed", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize(
    "shape", [(256, 256, 256), (199, 201, 203), (130, 100, 300), (192, 65, 128)]
)
def test_products_of_images_are_right(
    shape: tuple[int, int, int], transposed: tuple[bool, bool]
) -> None:
    m, n, k = shape
    rng = np.random.default_rng(1)
    a = rng.standard_normal((k, m) if transposed[0] else (m, k)).astype(np.float32) / k**0.5
    b = rng.standard_normal((n, k) if transposed[1] else (k, n)).astype(np.float32)
    bias = rng.standard_normal(n).astype(np.float32)

    def f(a, b, bias):
        return eg.tanh((a.T if transposed[0] else a) @ (b.T if transposed[1] else b) + bias) * 2.0

    compiled = eg.compile(f)
    got = compiled(a, b, bias).numpy()
    left, right = (x.T if t else x for x, t in zip((a, b), transposed))
    want = np.tanh(left.astype(np.float64) @ right + bias) * 2
    np.testing.assert_allclose(got, want, atol=1e-5)
    if eg.device().target.images:
        assert compiled.plan.images


def test_copies_follow_the_arguments() -> None:
    rng = np.random.default_rng(2)
    compiled = eg.compile(lambda x, w: eg.tanh(x @ w) @ w)
    for _ in range(3):
        x, w = (rng.standard_normal((160, 160)).astype(np.float32) / 8 for _ in range(2))
        want = np.tanh(x.astype(np.float64) @ w) @ w
        np.testing.assert_allclose(compiled(x, w).numpy(), want, atol=1e-5)
    profile = compiled.profile(x, w)
    assert len(profile.ns) == len(compiled.plan.kernels)
    assert min(profile.ns) > 0


def test_an_operand_that_is_read_after_the_product_as_well() -> None:
    rng = np.random.default_rng(3)
    x, w = (rng.standard_normal((256, 256)).astype(np.float32) / 16 for _ in range(2))
    compiled = eg.compile(lambda x, w: x @ w + x)
    got = compiled(x, w).numpy()
    np.testing.assert_allclose(got, x.astype(np.float64) @ w + x, atol=1e-6)
    assert len(compiled.plan.kernels) == 1


def test_rows_that_are_read_several_times_come_from_images() -> None:
    rng = np.random.default_rng(4)
    x = rng.standard_normal((512, 300)).astype(np.float32)

    def f(x):
        y = x - x.mean(-1, keepdims=True)
        return y * eg.rsqrt((y * y).mean(-1, keepdims=True) + 1e-5), x.sum(0)

    compiled = eg.compile(f)
    rows, columns = (v.numpy() for v in compiled(x))
    y = x.astype(np.float64) - x.mean(-1, keepdims=True, dtype=np.float64)
    np.testing.assert_allclose(rows, y / np.sqrt((y * y).mean(-1, keepdims=True) + 1e-5), atol=1e-5)
    np.testing.assert_allclose(columns, x.sum(0, dtype=np.float64), atol=1e-4)
    if eg.device().target.images:
        assert compiled.plan.images


def test_four_results_side_by_side_are_stored_together() -> None:
    rng = np.random.default_rng(5)
    x, w = (rng.standard_normal((128, 128)).astype(np.float32) / 11 for _ in range(2))

    def heads(x, w):
        return (x @ w).reshape(4, 32, 4, 32).transpose((0, 2, 1, 3)) * 2.0

    compiled = eg.compile(heads)
    want = 2 * (x.astype(np.float64) @ w).reshape(4, 32, 4, 32).transpose(0, 2, 1, 3)
    np.testing.assert_allclose(compiled(x, w).numpy(), want, atol=1e-5)
    (kernel,) = compiled.plan.kernels
    assert "out0: array<vec4<f32>>" in kernel.wgsl


@pytest.mark.parametrize("causal", [False, True])
def test_attention_reads_keys_and_values_from_images(causal: bool) -> None:
    rng = np.random.default_rng(6)
    q, k, v, ct = (rng.standard_normal((3, 4, 70, 32)).astype(np.float32) for _ in range(4))

    def loss(heads, ct):
        return (scaled_dot_product_attention(*heads, causal=causal) * ct).sum()

    compiled = eg.compile(eg.grad(loss))
    grads = [g.numpy() for g in compiled((q, k, v), ct)]
    x = [a.astype(np.float64) for a in (q, k, v, ct)]
    s = x[0] @ x[1].swapaxes(-1, -2) / 32**0.5
    s = np.where(np.tri(70, dtype=bool), s, -np.inf) if causal else s
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    dp = x[3] @ x[2].swapaxes(-1, -2)
    ds = p * (dp - (dp * p).sum(-1, keepdims=True)) / 32**0.5
    want = (ds @ x[1], ds.swapaxes(-1, -2) @ x[0], p.swapaxes(-1, -2) @ x[3])
    for got, expected in zip(grads, want, strict=True):
        np.testing.assert_allclose(got, expected, atol=2e-5)
    if eg.device().target.images:
        assert compiled.plan.images


def there_and_back(depth: int = 12) -> Plan:
    """Products whose operands are read once more in the reverse order."""
    rng = np.random.default_rng(5)
    x = rng.standard_normal((256, 256)).astype(np.float32)
    weights = [rng.standard_normal((256, 256)).astype(np.float32) for _ in range(depth)]

    def run(x, weights):
        for w in weights:
            x = eg.tanh(x @ w)
        for w in reversed(weights):
            x = eg.tanh(x @ w)
        return x

    return compile_graph(trace(run, x, weights), LLVMPIPE).plan


def bare(plan: Plan) -> Plan:
    kernels = tuple(
        replace(k, bindings=tuple(replace(b, image=-1) for b in k.bindings)) for k in plan.kernels
    )
    return replace(plan, kernels=kernels, images=(), copies=())


def test_what_is_read_again_stays_in_its_image_where_there_is_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = bare(there_and_back())
    assert len(plan.kernels) == 24
    weights = {b for b in plan.inputs if plan.buffers[b].shape == (256, 256)}
    found: dict[int, list[int]] = {}
    for room in (1, 3, 8, 1 << 20):
        monkeypatch.setattr(images, "ROOM", room)
        full = with_images(plan)
        verify_plan(full, LLVMPIPE)
        held = sum(image.nbytes for image in full.images)
        breaks = len({c.kernel for c in full.copies})
        found[room] = [sum(c.buffer in weights for c in full.copies), held, breaks]
    assert found[1][0] == 13  # x and each weight once
    copies, held = ([found[room][k] for room in sorted(found)] for k in (0, 1))
    assert copies == sorted(copies)
    assert copies[0] < copies[1] < copies[2] < copies[3]
    assert held == sorted(held, reverse=True)
    assert {f[2] for f in found.values()} == {24}
    least = with_images(plan, ahead=1)
    verify_plan(least, LLVMPIPE)
    assert sum(image.nbytes for image in least.images) < min(held)
