"""Legal tilings of contractions on a target, best first: pure integers, no WGSL and no device.

A `Tile` names a template and the values that it needs besides the operands. Its efficiency is the
share of the template's best flop rate that the shape can reach; it orders candidates and feeds the
cost model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil

from .lanes import LARGE, LONG, SHARE, can_store
from .target import Target
from .tile_rows import PACKED, UNPACK, lane_tiles, row_tiles

NVIDIA_WORKGROUP_BYTES = 48 << 10  # more hangs in the NVIDIA driver, without an error

Value = int | str | bool | tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Tile:
    """One way to run a contraction or an attention kernel.

    `params` are render values of `template`, the grid among them. With `swap`, the operands' values
    go through `templates.swapped` first. With `splits` > 1 the kernel writes [splits, batch, m, n]
    partial sums, which another kernel adds up.
    """

    template: str
    params: tuple[tuple[str, Value], ...]
    grid: tuple[int, int, int]
    workgroup: tuple[int, int, int]
    workgroup_bytes: int
    efficiency: float
    splits: int = 1
    swap: bool = False
    images: str = ""  # operands, of "a" and "b", that are better read from copies in images

    @property
    def values(self) -> dict[str, Value]:
        return dict(self.params)


def fold(groups: int, max_groups: int) -> tuple[int, int, int]:
    """A grid of at least `groups` workgroups, within the limit of each dimension, few surplus."""
    rows = ceil(groups / max_groups)
    if rows > max_groups:
        raise ValueError(f"a grid needs at most {max_groups}^2 workgroups, got {groups}")
    return (ceil(groups / rows), rows, 1)


def workgroup_budget(target: Target) -> int:
    """Bytes of workgroup memory that a kernel may take."""
    return min(target.max_workgroup_bytes, NVIDIA_WORKGROUP_BYTES)


@dataclass(frozen=True, slots=True)
class Product:
    """A contraction as a template sees it: operands exchanged already when `swap`."""

    batch: int
    m: int
    n: int
    k: int
    a_axis: str
    b_axis: str
    swap: bool
    words: tuple[float, float] = (1.0, 1.0)  # in memory, an element of a and of b
    skews: tuple[str, str] = ("", "")  # "k", or "row" (of a; column, of b): lies along it, anywhere

    @property
    def flops(self) -> int:
        return 2 * self.batch * self.m * self.n * self.k

    def swapped(self) -> Product:
        other = {"m": "n", "n": "m", "k": "k", "none": "none"}
        a_axis, b_axis = other[self.b_axis], other[self.a_axis]
        words, skews = (self.words[1], self.words[0]), (self.skews[1], self.skews[0])
        shape = self.batch, self.n, self.m, self.k
        return Product(*shape, a_axis, b_axis, not self.swap, words, skews)


def candidates(
    target: Target,
    batch: int,
    m: int,
    n: int,
    k: int,
    a_vec_axis: str = "k",
    b_vec_axis: str = "n",
    count: int = 4,
    words: tuple[float, float] = (1.0, 1.0),
    skews: tuple[str, str] = ("", ""),
) -> list[Tile]:
    """The `count` best tilings of c[batch, m, n] = a[batch, m, k] b[batch, k, n]; never empty.

    The vector axes are those of `templates.Axis`; `words` are the words in memory an element of a
    and of b; `skews` are the axes along which they can be read as vec4s that begin anywhere ("k",
    or "row", that of the result; "": none).
    """
    if min(batch, m, n, k) < 1:
        raise ValueError(
            f"a contraction needs positive extents, got batch {batch}, {m} x {n} x {k}"
        )
    product = Product(batch, m, n, k, a_vec_axis, b_vec_axis, False, words, skews)
    tiles: list[Tile] = []
    if target.kind == "cpu" and target.subgroup > 1:
        tiles.extend(_shuffle_tiles(target, product))
        tiles.extend(_shuffle_tiles(target, product.swapped()))
        tiles.extend(row_tiles(target, product))
        tiles.extend(row_tiles(target, product.swapped()))
    else:
        tiles.extend(_shared_tiles(target, product))
        tiles.extend(_row_tiles(target, product))
        tiles.extend(_row_tiles(target, product.swapped()))
        tiles.extend(lane_tiles(target, product))
        tiles.extend(lane_tiles(target, product.swapped()))
    tiles.sort(key=lambda tile: (-tile.efficiency, tile.splits, tile.swap, tile.grid))
    return tiles[:count]


def split_counts(busy: int, wanted: int, k: int, least: int) -> list[int]:
    """1, and the powers of 2 that bring `busy` up to `wanted` with `least` steps of k in each."""
    splits = [1]
    while busy * splits[-1] < wanted and k // (2 * splits[-1]) >= least:
        splits.append(2 * splits[-1])
    return splits


# -- llvmpipe: one subgroup a tile -----------------------------------------------------------------

# measured nanoseconds of one core for 8 lanes; wider vectors take proportionally longer
_LOAD4, _LOAD1, _STORE4, _STORE1 = 26.0, 12.0, 21.0, 9.3
_IMAGE4, _IMAGE1 = 6.5, 5.0  # loads from images
_MULTIPLY_ADD, _SHUFFLE, _GROUP = 0.24, 0.3, 100.0
BEST_FLOP_PER_NS = 44.0  # of one core
_WORKERS = 4  # groups that should be there for an even share of the threads
_ADD_PARTS = 40_000.0  # nanoseconds of the kernel that adds up the partial sums
_COPY, _COPIED = 20_000.0, 20.0  # nanoseconds of a copy to an image, and bytes a nanosecond
_MOST_STEPS = 32  # of k a block: the driver takes long for loads
# rows of b with so many elements: each step of k beyond so many in a block adds to the time, since
# it is another line of memory under way
_FAR, _NEAR_STEPS, _FAR_APART = 2048, 8, 0.2
_MOST_ROWS = 64  # of a tile; 32 where loads are fast, for long kernels take long to compile
# multiplications from which on skewed loads save enough: their code takes a second to translate
_WORTH_TEXT = 1 << 24
_TWO_LOADS = 1.75  # vec4s that are loaded for one of a row that begins anywhere
_ROWS = (1, 2, 4, 8, 16, 32, 64)
_SKEWED_ROWS = (*_ROWS[:-1], 56, 64)  # 513 is ten tiles of 52 rather than nine of 60: 4 % less time


def _skewed(target: Target, product: Product) -> list[str]:
    """The operands, of "a" and "b", that may be loaded as skewed vec4s: none, or all that can."""
    found = [name for name, axis in zip("ab", product.skews, strict=True) if axis]
    if product.batch * product.m * product.n * product.k < _WORTH_TEXT:
        return [""]
    return ["", "".join(found)] if found and target.images else [""]


def _shuffle_tiles(target: Target, product: Product) -> Iterator[Tile]:
    for skew in _skewed(target, product):
        yield from _tiles_of(target, product, skew)


def _tiles_of(target: Target, product: Product, skew: str) -> Iterator[Tile]:
    p, lanes = product, target.subgroup
    fast = target.images and "none" not in (p.a_axis, p.b_axis)
    for most in _SKEWED_ROWS if "a" in skew else _ROWS:
        if (most > 8 and most >= 2 * p.m) or most > _MOST_ROWS // (2 if fast else 1):
            break
        rows = _even_rows(target, p, most, skew)
        quads = 1 << (rows // 4).bit_length()  # lanes of one step of k that hold a skewed column
        if "a" in skew and (rows < lanes or (p.skews[0] == "row" and quads > lanes)):
            continue
        for width in (4,) if "b" in skew else (1, 4):
            tiles = p.batch * ceil(p.m / rows) * ceil(p.n / (lanes * width))
            block = _block_of_k(target, rows, p.k)
            for splits in split_counts(tiles, 2 * _WORKERS, p.k, 256):
                loops = ceil(p.k // block / splits)
                if target.loop_limit and loops >= target.loop_limit:
                    continue
                if tiles * splits > target.max_groups**2:
                    continue
                grid = fold(tiles * splits, target.max_groups)
                spent, images = _shuffle_ns(target, p, rows, width, tiles, splits, skew)
                spent *= _far_apart(p, width, block)
                params: tuple[tuple[str, Value], ...] = (
                    ("L", lanes), ("TM", rows), ("CW", width), ("CV", 1), ("KU", block),
                    ("splits", splits), ("grid", grid),
                )  # fmt: skip
                if skew:
                    params += ("skew", skew), ("quads", quads)
                plain = Tile(
                    template="contract_cpu.wgsl.j2",
                    params=params,
                    grid=grid,
                    workgroup=(lanes, 1, 1),
                    workgroup_bytes=0,
                    efficiency=min(1.0, p.flops / BEST_FLOP_PER_NS / spent),
                    splits=splits,
                    swap=p.swap,
                    images=images,
                )
                yield plain
                saved = _saved_in_turn(target, p, rows, width, tiles, splits)
                if saved > 0 and grid[0] * grid[1] == tiles * splits:
                    yield replace(
                        plain,
                        params=(*params, ("turns", True)),
                        efficiency=min(1.0, p.flops / BEST_FLOP_PER_NS / (spent - saved)),
                    )


def _saved_in_turn(
    target: Target, product: Product, rows: int, width: int, tiles: int, splits: int
) -> float:
    """Nanoseconds of one core that are saved where lanes store one after the other; 0 where they
    cannot, or a text that is longer and no part of a merged kernel is not worth it."""
    p, lanes = product, target.subgroup
    whole = width == 4 and not p.swap and p.m % rows == 0 and p.n % (4 * lanes) == 0
    size = p.batch * p.m * p.n
    worth = size >= LARGE and size * p.k >= LONG
    if not (whole and worth and can_store(target, [("f32", size * splits)])):
        return 0.0
    return tiles * splits * rows * (1 - SHARE) * _STORE4 * lanes / 8


def _far_apart(product: Product, width: int, block: int) -> float:
    """The time more of a block's loads of b that lie far apart, and are read once."""
    far = product.b_axis == "n" and width == 4 and product.n >= _FAR
    return 1 + _FAR_APART * max(0, block // _NEAR_STEPS - 1) if far else 1.0


def _even_rows(target: Target, product: Product, most: int, skew: str) -> int:
    """The least rows of as few tiles as `most` rows a tile need."""
    p = product
    if "a" in skew:  # a tile begins at a multiple of 4, and a column fits in the lanes
        most = min(most, 4 * (target.subgroup - 1)) if p.skews[0] == "row" else most
        return ceil(p.m / ceil(p.m / most) / 4) * 4
    rows = ceil(p.m / ceil(p.m / most))
    return rows if rows >= target.subgroup and p.a_axis != "m" else most


def _block_of_k(target: Target, rows: int, k: int) -> int:
    """Steps of k a block: what one load of a covers, more where loops would be too long."""
    block = max(4, min(_MOST_STEPS, 4 * target.subgroup // rows))
    while target.loop_limit and k // block >= target.loop_limit // 2 and block < 64:
        block *= 2
    return block


def _shuffle_ns(
    target: Target, product: Product, rows: int, width: int, tiles: int, splits: int, skew: str
) -> tuple[float, str]:
    """(nanoseconds of one core for the whole product, idle threads counted; operands that are
    better read from images)."""
    p, lanes = product, target.subgroup
    groups = ceil(tiles * splits / _WORKERS) * _WORKERS
    steps = groups * ceil(p.k / splits) * lanes / 8  # of all groups
    copied, images = 0.0, ""
    # loads of one step of k: by vec4, by single elements; bytes in all
    vector_a = p.a_axis == "k" or (p.a_axis == "m" and rows >= 4)
    vector_b = p.b_axis == "k" or (p.b_axis == "n" and width == 4)
    at_once = ceil(rows / lanes) if rows > lanes else rows / lanes
    loads = {
        "a": (at_once / 4, at_once, vector_a, 4 * p.batch * p.m * p.k),
        "b": (1.0 if p.b_axis != "k" else width / 4, width, vector_b, 4 * p.batch * p.k * p.n),
    }
    step = 0.0
    for name, (fours, ones, vector, nbytes) in loads.items():
        if p.words[name == "b"] < PACKED:  # words and scales, which several steps share; no images
            step += ones * (_LOAD1 / 2 + UNPACK)
            continue
        if name in skew:
            step += _IMAGE4 * _skewed_loads(p, name, rows, lanes)
            copied += 2 * (_COPY + nbytes / _COPIED)
            images += {"a": "b", "b": "a"}[name] if p.swap else name
            continue
        each = fours * _LOAD4 if vector else ones * _LOAD1
        less = fours * _IMAGE4 if vector else ones * _IMAGE1
        copy = 2 * (_COPY + nbytes / _COPIED)  # by one thread
        if target.images and steps * (each - less) > copy:
            each, copied = less, copied + copy
            images += {"a": "b", "b": "a"}[name] if p.swap else name
        step += each
    used = min(rows, p.m)
    step += used * (_SHUFFLE + width * _MULTIPLY_ADD)
    vector_store = width == 4 and p.n % 4 == 0 and not p.swap
    stores = used * (_STORE4 if vector_store else _STORE1 * width) * lanes / 8
    spent = steps * step + groups * (stores + _GROUP) + copied
    return spent + (_ADD_PARTS if splits > 1 else 0.0), "".join(sorted(images))


def _skewed_loads(product: Product, name: str, rows: int, lanes: int) -> float:
    """Loads of vec4s a step of k, of an operand whose rows begin anywhere."""
    if name == "b":
        return 1.0 if product.skews[1] == "k" else _TWO_LOADS
    if product.skews[0] == "k":
        return ceil(rows / lanes) / 4
    return (1 << (rows // 4).bit_length()) / lanes


# -- shared memory: one workgroup a tile -----------------------------------------------------------

# rows, columns, steps of k; rows and columns a thread; staged blocks; fours of k written out; the
# share of the best rate once there are many, and of that where b must be turned while it is staged
# (measured on an H200; those below 64 by 64 estimated)
_SHARED = (
    (128, 128, 8, 16, 8, 2, 1, 0.98, 0.80),
    (128, 128, 16, 8, 8, 2, 4, 1.0, 0.70),
    (128, 64, 8, 16, 8, 2, 2, 0.85, 0.80),
    (64, 64, 16, 8, 8, 2, 4, 0.90, 0.94),
    (64, 64, 16, 8, 4, 2, 2, 0.65, 0.94),
    (64, 64, 16, 4, 4, 2, 2, 0.55, 0.94),
    (32, 64, 32, 4, 4, 2, 2, 0.50, 0.94),
    (64, 32, 32, 4, 4, 2, 2, 0.50, 0.94),
    (32, 32, 32, 4, 4, 2, 2, 0.45, 0.94),
    (32, 32, 64, 4, 4, 1, 2, 0.44, 0.94),
    (16, 64, 32, 2, 4, 1, 2, 0.30, 0.94),
    (64, 16, 32, 4, 4, 1, 2, 0.35, 0.94),
    (16, 16, 32, 2, 4, 1, 2, 0.25, 0.94),
)
BUSY_THREADS = 128 * 256  # that fill a large GPU
_PROCESSOR_RATE = 318.0  # flop per ns of one processor of a GPU at a profile's best rate
_STEPS_AROUND = 32  # of k, as long as filling the staged blocks and storing the results take
_SPLIT_COST = 0.8  # share of the rate left once partial sums are written and added


def _shared_tiles(target: Target, product: Product) -> Iterator[Tile]:
    p = product
    for bm, bn, bk, tm, tn, stages, unroll, rate, turned in _SHARED:
        threads = bm // tm * (bn // tn)
        nbytes = 4 * stages * bk * (bm + 4 + bn + 4)
        if threads > target.max_invocations or nbytes > workgroup_budget(target):
            continue
        tiles = p.batch * ceil(p.m / bm) * ceil(p.n / bn)
        rate *= turned if p.b_axis == "k" else 1.0
        for splits in split_counts(tiles * threads, 4 * BUSY_THREADS, p.k, 128):
            if tiles * splits > target.max_groups**2:
                continue
            busy = _busy(target, tiles * splits, threads)
            useful = p.batch * p.m * p.n / (tiles * bm * bn)
            part = ceil(p.k / splits)
            useful *= part / (ceil(part / bk) * bk + _STEPS_AROUND)
            efficiency = _with_parts(target, p, splits, rate * useful * busy)
            grid = fold(tiles * splits, target.max_groups)
            params: tuple[tuple[str, Value], ...] = (
                ("BM", bm), ("BN", bn), ("BK", bk), ("TM", tm), ("TN", tn), ("stages", stages),
                ("a_steps", tm % 4 > 0), ("b_steps", False), ("unroll", unroll),
                ("splits", splits), ("grid", grid),
            )  # fmt: skip
            yield Tile(
                template="contract_gpu.wgsl.j2",
                params=params,
                grid=grid,
                workgroup=(threads, 1, 1),
                workgroup_bytes=nbytes,
                efficiency=efficiency,
                splits=splits,
            )


def processors(target: Target) -> int:
    """How many a GPU has, by its rate of products."""
    return max(1, round(target.profile.contract / _PROCESSOR_RATE))


def _busy(target: Target, groups: int, threads: int) -> float:
    """The share of a GPU that workgroups keep busy: its processors take them in rounds, the last of
    which may be short, and small workgroups must share a processor to fill it."""
    each = groups / processors(target)
    alone = 0.3 if threads < 128 else 0.0
    return each / ceil(each) * each / (each + alone)


def _with_parts(target: Target, product: Product, splits: int, efficiency: float) -> float:
    """The efficiency once partial sums, where there are some, are written, read and added up."""
    if splits == 1:
        return efficiency
    p, profile = product, target.profile
    best = p.flops / profile.contract
    moved = 8.0 * splits * p.batch * p.m * p.n
    return best / (best / efficiency + profile.launch + moved / profile.bandwidth)


def _row_tiles(target: Target, product: Product) -> Iterator[Tile]:
    """For at most 4 rows: bound by reading b once, so what counts is how many threads read."""
    p = product
    if p.m > 4:
        return
    rate = 0.3 if p.words[1] >= PACKED else 0.1  # words are loaded again for each of their fields
    shapes = ((4, 32), (2, 64), (1, 128)) if p.b_axis == "k" else ((8, 16), (16, 8), (8, 32))
    for across, along in shapes:
        threads = across * along
        nbytes = 16 * p.m * threads
        if threads > target.max_invocations or nbytes > workgroup_budget(target):
            continue
        tiles = p.batch * ceil(p.n / (4 * across))
        for splits in split_counts(tiles * threads, BUSY_THREADS, p.k, 16 * along):
            if tiles * splits > target.max_groups**2:
                continue
            busy = min(1.0, tiles * splits * threads / BUSY_THREADS)
            useful = p.batch * p.n / (tiles * 4 * across)
            useful *= p.k / (ceil(p.k / (4 * along)) * 4 * along)
            grid = fold(tiles * splits, target.max_groups)
            yield Tile(
                template="contract_row_gpu.wgsl.j2",
                params=(("CX", across), ("KY", along), ("splits", splits), ("grid", grid)),
                grid=grid,
                workgroup=(threads, 1, 1),
                workgroup_bytes=nbytes,
                efficiency=rate * useful * busy * (_SPLIT_COST if splits > 1 else 1.0),
                splits=splits,
                swap=p.swap,
            )
