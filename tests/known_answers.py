"""Small inputs with known right answers, each of a kind that goes wrong in some tensor compiler.

`CASES[i]["fn"]()` gives (inputs, expected): inputs is a dict of arrays, expected an array or a dict
of them. `essence` says what goes wrong elsewhere. They stand for kinds: the kind is to be right,
not the one input.
"""

import numpy as np

F = np.float32
CASES = []
nan, inf = float("nan"), float("inf")


def case(group, essence, note="", tol=1e-5):
    def deco(f):
        CASES.append(dict(name=f.__name__, group=group, essence=essence, note=note, tol=tol, fn=f))
        return f

    return deco


def softmax(x, axis=-1):
    e = np.exp(x - x.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


def sdpa(q, k, v, mask=None, scale=None):
    s = q @ np.swapaxes(k, -1, -2) * (scale or 1 / np.sqrt(q.shape[-1]))
    if mask is not None:
        s = np.where(mask, s, -inf)
    m = s.max(-1, keepdims=True)
    m = np.where(np.isfinite(m), m, 0.0)
    e = np.exp(s - m)
    d = e.sum(-1, keepdims=True)
    return np.where(d == 0, 0.0, e / np.where(d == 0, 1, d)) @ v


@case(
    "nan/inf",
    "a runtime value times an infinity CONSTANT came back 0 (WGSL may assume no infinities); tinygrad now passes inf in a uniform",
    "the multiply must stay in the kernel (not folded on the host)",
)
def inf_times_variable():
    x = np.array([1, 5, 1e-3, -2], F)
    return dict(x=x), x * F(inf)  # [inf, inf, inf, -inf]


@case(
    "nan/inf",
    "an inf or NaN literal in the shader text is a compile error in naga ('cannot represent the abstract value -inf'); so are 1.0/0.0 and 3.5e38",
    "checked with wgpu-py 0.32 (naga 29): bitcast<f32>(0x7f800000u) does compile and gives inf, no uniform needed; Tint refuses it as a constant expression",
)
def neg_inf_fill():
    x = np.array([1, 2, 3], F)
    m = np.array([True, False, True])
    return dict(x=x, m=m), np.where(
        m, x, F(-inf)
    )  # [1,-inf,3]; its max is 3; full(-inf).max() is -inf


@case(
    "nan/inf",
    "where(c,a,b) computed as a*c + b*(1-c): an inf or NaN in the branch not taken poisons the result",
)
def where_dead_branch_forward():
    c = np.array([True, False])
    a = np.array([1, inf], F)
    b = np.array([nan, 3], F)
    return dict(c=c, a=a, b=b), np.where(c, a, b)  # [1,3]


@case("nan/inf", "WGSL tanh is allowed to be sinh/cosh: NaN for |x| > 88.7 in f32 (11.1 in f16)")
def tanh_saturates():
    x = np.array([1000, -1000, 88.8, 44.4, 0, inf, -inf], F)
    return dict(x=x), np.tanh(x)  # [1,-1,1,1,0,1,-1]


@case(
    "nan/inf",
    "IEEE basics through the compiled kernel: 1/0, 0/0, log(0), log(-1), sqrt(-1), exp overflow and underflow",
)
def ieee_basics():
    with np.errstate(all="ignore"):
        a = np.array([1, -1, 0], F)
        return dict(a=a), dict(
            div0=a / F(0),
            log=np.log(np.array([0, -1, 1], F)),
            sqrt=np.sqrt(np.array([-1, 0, 4], F)),
            exp=np.exp(np.array([100, -200, 0], F)),
        )


@case("softmax", "softmax over an axis that is not the last")
def softmax_axis1():
    x = np.linspace(-2, 3, 24, dtype=F).reshape(2, 3, 4)
    return dict(x=x, axis=1), softmax(x.astype(np.float64), 1)


@case(
    "cross entropy",
    "target far below the max: loss 858 and a finite gradient [-1, 0, 1], not inf/NaN",
)
def ce_far_target():
    z = np.array([[-431.0, 279.0, 427.0]])
    p = softmax(z)
    p[0, 0] -= 1
    return dict(logits=z.astype(F), target=np.array([0])), dict(loss=858.0, grad=p)


@case(
    "attention",
    "a row whose keys are all masked: output 0 (torch safe-softmax and the ONNX Attention spec), never NaN; zero, not NaN, gradients",
)
def sdpa_fully_masked_row():
    q = np.arange(8, dtype=np.float64).reshape(1, 1, 4, 2) / 8
    m = np.ones((1, 1, 4, 4), bool)
    m[0, 0, 1] = False
    return dict(q=q.astype(F), k=q.astype(F), v=(q + 1).astype(F), mask=m), sdpa(
        q, q, q + 1, m
    )  # row 1 is [0,0]


@case(
    "attention",
    "causal mask when Lq < Lk. Decode with a cache wants bottom-right (query i sees keys <= i + Lk - Lq); torch is_causal is top-left. Wrong choice = silently wrong logits",
    "give both an explicit name",
)
def sdpa_causal_lq_ne_lk():
    r = np.random.default_rng(0)
    q = r.standard_normal((1, 2, 4))
    k = r.standard_normal((1, 5, 4))
    v = np.eye(5)[None, :, :4]
    i, j = np.arange(2)[:, None], np.arange(5)[None]
    return dict(q=q.astype(F), k=k.astype(F), v=v.astype(F)), dict(
        bottom_right=sdpa(q, k, v, j <= i + 3), top_left=sdpa(q, k, v, j <= i)
    )


@case(
    "attention",
    "GQA: query heads 0,1 use kv head 0 and 2,3 use kv head 1 (repeat_interleave), not 0,1,0,1 (tile)",
)
def gqa_head_map():
    q = np.ones((4, 1, 2))
    k = np.ones((2, 1, 2))
    v = np.array([[[1.0, 1.0]], [[5.0, 5.0]]])
    return dict(q=q.astype(F), k=k.astype(F), v=v.astype(F)), sdpa(
        q, np.repeat(k, 2, 0), np.repeat(v, 2, 0)
    )  # 1,1,5,5


@case(
    "gradient",
    "max with ties: amax/jax split evenly, torch max(dim) takes the first; either way the gradients sum to 1 (some give 1 to each)",
    "expected here: even split",
)
def grad_max_ties():
    x = np.array([1, 2, 2, 1, 2], F)
    g = (x == 2) / 3.0
    return dict(x=x), g


@case(
    "gradient",
    "WGSL pow(x, 2) is NaN for negative x: integer exponents need their own path; fractional ones are NaN as in numpy; 0**0 = 1",
)
def pow_negative_base():
    x = np.array([-3, -2, -1, 0, 1, 2], F)
    with np.errstate(all="ignore"):
        return dict(x=x), {2: x**2, 3: x**3, 0: x**0, -1: 1 / x, 0.5: np.sqrt(x)}


@case(
    "gradient",
    "embedding gradient with repeated ids must ADD; atomicAdd on bitcast<u32> adds bit patterns; jax-js still has no gather transpose",
)
def grad_gather_duplicates():
    g = np.zeros((50, 2))
    np.add.at(g, [3, 9, 3, 41], np.array([[1, 1], [2, 2], [3, 3], [4, 4.0]]))
    return dict(
        table=np.zeros((50, 2), F),
        ids=np.array([3, 9, 3, 41]),
        cotangent=np.array([[1, 1], [2, 2], [3, 3], [4, 4]], F),
    ), g


@case(
    "norm",
    "variance as E[x^2]-E[x]^2: garbage for a large mean. Two passes or Welford",
    "row = mean + i*1e-3, 16 values, eps 1e-5. At mean 1000 the naive form gives -2.37, a plain f32 two-pass -1.3095 (jax, tinygrad, ferrotensor cpu today): tolerance 5e-2 accepts it, 2e-2 needs a corrected mean or Welford",
    0.02,
)
def layernorm_large_mean():
    out = {}
    for m in (0.0, 100.0, 1000.0, 10000.0):
        x = (F(m) + np.arange(16, dtype=F) * F(1e-3)).astype(F).astype(np.float64)
        out[m] = (x - x.mean()) / np.sqrt(x.var() + 1e-5)
    return dict(means=[0, 100, 1000, 10000]), {k: v[:3] for k, v in out.items()}


@case(
    "shape",
    "zero-size tensors: reduce over the non-empty axis works, sum over the empty one is 0, mean is NaN, max raises; matmul with K=0 is zeros; a dispatch of 0 groups is legal",
)
def zero_size():
    return dict(a=np.zeros((2, 0), F)), dict(
        max0_shape=np.zeros(0),
        sum1=np.zeros(2),
        mean1=np.full(2, nan),
        matmul=np.zeros((2, 3)),
        max1="ValueError",
    )


@case(
    "shape",
    "matmul broadcasting (1,7,5)@(5,3), and a square size not divisible by 4 (10x10) that came out wrong",
)
def matmul_broadcast_odd():
    r = np.random.default_rng(0)
    a, b, c = r.random((1, 7, 5)), r.random((5, 3)), r.random((10, 10))
    return dict(a=a.astype(F), b=b.astype(F), c=c.astype(F)), dict(ab=a @ b, cc=c @ c)


@case("shape", "permute, then reduce and multiply in one fused kernel used the unpermuted strides")
def permute_then_reduce():
    x = np.arange(1024, dtype=np.float64).reshape(2, 2, 256) / 64
    y = x.transpose(2, 0, 1)
    return dict(x=x.astype(F)), dict(sum_last=(y * 2).sum(-1)[:3], sum_all=(y * 2).sum())


@case(
    "shape",
    "sum over axes (1,2) at once, with keepdims, must equal two single sums; negative and unsorted axes too",
)
def multi_axis_reduce():
    x = np.arange(8 * 15 * 8, dtype=np.float64).reshape(8, 15, 8) / 100
    return dict(x=x.astype(F), axis=(-1, 1)), dict(
        keep=x.sum((1, 2), keepdims=True), flat=x.sum((1, 2))
    )


@case(
    "shape", "argmax ties give the FIRST index (numpy), also for negative ints: argmax(~[2,2]) = 0"
)
def argmax_ties():
    a = np.array([[1, 5], [2, 10], [3, 3]])
    return dict(a=a, b=np.array([2, 2])), dict(a=a.argmax(1), not_b=0)  # [1,1,0]


@case(
    "int",
    "an int32 constant written as 0xFFFFFFFF must wrap to -1, not fail to compile; int sums wrap mod 2^32",
)
def int_wraparound():
    return dict(x=np.array([0], np.int32), c=0xFFFFFFFF), dict(
        or_=np.array([-1], np.int32), sum=np.array([2**31 - 1, 1], np.int32).sum(dtype=np.int32)
    )


@case(
    "limits",
    "more than 65535 workgroups in one dimension: batch of 70001 3x3 matmuls, and an elementwise op on 65535*64+1 = 4194241 values",
)
def dispatch_over_65535():
    return dict(batch=70001, a="full((70001,3,3), 2)", n=4194241), dict(
        matmul_every=12.0, add_one_last=1.0
    )


@case(
    "numerics",
    "mean of 2^24+ ones, or of 1e7 values near 1: a single running f32 sum stalls at 16777216; tree or per-lane partial sums are exact here",
)
def long_sum():
    return dict(x="ones(2**24 + 64)"), dict(sum=float(2**24 + 64), mean=1.0)
