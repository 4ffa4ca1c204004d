"""Copies of operands in images, which some devices read faster than buffers: how an array lies in
one, and when each copy is made.

A copy ends a compute pass, so copies that kernels soon need are made together. One that is read
again much later, as what the backward pass reads of the forward pass, stays where there is room.
What a merged kernel reads of each of its parts are layers of one image; a value that another kernel
reads before is copied to its layer at once, where there is room, and serves both. What a loop reads
from around it is copied once, before the loop, into images that nothing else in the loop uses.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from .plan import Binding, Copy, Image, Kernel, Plan, Repeat
from .rounds import Loops

AHEAD = 8  # kernels for which copies are made early, or kept
ROOM = 1  # as much as the rest of a call's memory may hold copies for kernels beyond these,
MOST_ROOM = 1 << 30  # bytes at most
EARLY = 256 << 20  # bytes of images that stand ready
LINE = 64  # bytes that are added to each row, so that rows do not compete for the same cache lines
_ALIGNED = 256  # bytes, of which a row of a copy is a multiple
MOST = 16384 - 16  # texels each way
FLAT = 1024  # texels of a row of an array that has no rows of its own
KEPT = ("image1u", "image4u")  # copies of words, which are weights, stay for later calls
LARGEST = FLAT * MOST  # elements of an array in an image
LAYERS = 256  # of an image


Key = tuple[tuple[int, ...], str]  # buffers, a layer each, and the access
Place = tuple[int, int]  # an image and the first layer


@dataclass(frozen=True, slots=True)
class Texel:
    """The elements of an image: f32 or vec4<f32>."""

    nbytes: int
    format: str


TEXELS = {
    "image1": Texel(4, "r32float"),
    "image4": Texel(16, "rgba32float"),
    "image1u": Texel(4, "r32float"),  # the bits of words
    "image4u": Texel(16, "rgba32float"),
}


def row_width(shape: Sequence[int], element: str) -> int:
    """The texels of an array that lie in one row of an image: a row of the array, where it can."""
    texel = TEXELS[element].nbytes
    count = 4 * math.prod(shape) // texel
    width = FLAT
    if element == "image4" and shape and 4 * shape[-1] % _ALIGNED == 0:
        width = shape[-1] // 4
    width = width if width <= MOST else FLAT
    while count > width * MOST:
        width *= 2
    return width


def image_for(shape: Sequence[int], element: str) -> Image:
    """The smallest image for an array."""
    width, texel = row_width(shape, element), TEXELS[element].nbytes
    rows = -(-4 * math.prod(shape) // (texel * width))
    return Image(texel, width + LINE // texel, rows)


def with_images(plan: Plan, ahead: int = AHEAD) -> Plan:
    """The plan with the images that its kernels read, and the copies that fill them.

    Copies are made early, and kept, for so many kernels ahead; with 1 in the least memory.
    """
    if all(b.access not in TEXELS for kernel in plan.kernels for b in kernel.bindings):
        return plan
    return _Images(plan, ahead).placed()


@dataclass(slots=True)
class _Stack:
    """The image of a key of several buffers, until the key was read and no layer of it is held for
    a buffer of its own."""

    image: int
    filled: set[int] = field(default_factory=set[int])  # layers
    read: bool = False


class _Images:
    """Which image holds what as kernels run; it is known by its buffers and access."""

    def __init__(self, plan: Plan, ahead: int) -> None:
        self.plan, self.ahead = plan, ahead
        self.room = min(plan.peak_bytes // ROOM, MOST_ROOM) if ahead > 1 else 0
        self.images: list[Image] = []
        self.free: list[int] = []
        self.held: dict[Key, Place] = {}
        self.fixed: dict[Key, Place] = {}  # of these, held while a loop runs
        self.kept: dict[Key, Place] = {}  # of arguments, for all calls
        self.stacks: dict[Key, _Stack] = {}
        self.first: list[Copy] = []  # which fill what is kept
        self.copies: list[Copy] = []
        self.written: dict[int, int] = {}
        loops = Loops(plan)
        self.around = [loops.around(k) for k in range(len(plan.kernels))]
        for k, kernel in enumerate(plan.kernels):
            for number in (n for b in kernel.bindings[: kernel.writes] for n in b.buffers):
                self.written[number] = k
        self.reads: dict[Key, list[int]] = {}  # the kernels that read what, the last one first
        for k in reversed(range(len(plan.kernels))):
            for key in self._read(k):
                self.reads.setdefault(key, []).append(k)
        self.stacks_of: dict[Key, list[Key]] = {}  # those that have a layer for a buffer
        for key in self.reads:
            for buffer in key[0] if len(key[0]) > 1 else ():
                self.stacks_of.setdefault(((buffer,), key[1]), []).append(key)

    def placed(self) -> Plan:
        kernels: list[Kernel] = []
        for k, kernel in enumerate(self.plan.kernels):
            before = self.around[k - 1] if k else []
            if self.around[k] != before:
                self._enter(k, same=bool(before) and self.around[k][:1] == before[:1])
            for key in self._read(k):
                if key not in self.kept and self._stays(key):
                    self._keep(key)
            if any(key not in self.held for key in self._read(k)):
                self._copy_before(k)
            kernels.append(replace(kernel, bindings=tuple(map(self._bound, kernel.bindings))))
            self._release_after(k)
        images, copies = tuple(self.images), (*self.first, *self.copies)
        return replace(self.plan, kernels=tuple(kernels), images=images, copies=copies)

    def _bound(self, binding: Binding) -> Binding:
        key = binding.buffers, binding.access
        image, layer = self.kept.get(key, self.held.get(key, (-1, 0)))
        return replace(binding, image=image, layer=layer)

    def _stays(self, key: Key) -> bool:
        """Whether these are words of arguments that the call does not write to."""
        plan, (buffers, element) = self.plan, key
        donated = {plan.inputs[i] for i in plan.donated}
        return element in KEPT and all(
            plan.buffers[b].place[0] == "input" and b in plan.inputs and b not in donated
            for b in buffers
        )

    def _keep(self, key: Key) -> None:
        """Copies that are made once for all calls, to an image of their own."""
        self.images.append(self._needed(key))
        place = self.kept[key] = len(self.images) - 1, 0
        self.first += [replace(copy, kept=True) for copy in self._filled(0, key, place)]

    def _enter(self, k: int, same: bool) -> None:
        """At the first kernel of other loops: what is held was copied in rounds that may differ.

        `same`: the outermost loop is the one of the kernel before.
        """
        self.fixed = self.fixed if same else {}
        for key in [key for key in self.held if key not in self.fixed]:
            self._let_go(key)
        for key in list(self.stacks):
            self._leave(key)
        if self.around[k] and not same:
            self._copy_once(k, self.plan.loops[self.around[k][0]])

    def _copy_once(self, k: int, loop: Repeat) -> None:
        """Copy what a loop reads from images and never changes."""
        inside = range(loop.start, loop.stop)
        for key in dict.fromkeys(key for j in inside for key in self._read(j)):
            view = any(self.plan.buffers[b].place[0] == "loop" for b in key[0])
            if view or self._last_written(key) >= loop.start:
                continue
            if self._bytes_held() + self._needed(key).nbytes > EARLY:
                continue
            place = self.held[key] = self.fixed[key] = self._take(self._needed(key)), 0
            self.copies += [replace(copy, once=True) for copy in self._filled(k, key, place)]

    def _read(self, k: int) -> list[Key]:
        """What kernel k reads from images."""
        bindings = self.plan.kernels[k].bindings
        keys = [(b.buffers, b.access) for b in bindings if b.access in TEXELS]
        return [key for key in keys if key not in self.kept]

    def _needed(self, key: Key) -> Image:
        buffers, element = key
        one = image_for(self.plan.buffers[buffers[0]].shape, element)
        return replace(one, layers=len(buffers))

    def _last_written(self, key: Key) -> int:
        """The last kernel that writes one of the buffers."""
        return max(self.written.get(b, -1) for b in key[0])

    def _copy(self, k: int, key: Key) -> None:
        """Copy before kernel k what is not there yet."""
        buffers, _ = key
        stack = key if buffers[1:] else self._stack_for(k, key)
        if stack is None:
            place = self.held[key] = self._take(self._needed(key)), 0
            self.copies += self._filled(k, key, place)
            return
        there = self._stack(stack)
        place = self.held[key] = there.image, 0 if stack == key else stack[0].index(buffers[0])
        new = [c for c in self._filled(k, key, place) if c.layer not in there.filled]
        there.filled |= {c.layer for c in new}
        self.copies += new

    def _filled(self, k: int, key: Key, place: Place) -> list[Copy]:
        """The copies of a key's buffers before kernel k."""
        (buffers, element), (image, first) = key, place
        width = row_width(self.plan.buffers[buffers[0]].shape, element)
        return [Copy(k, b, image, width, layer=layer) for layer, b in enumerate(buffers, first)]

    def _stack(self, key: Key) -> _Stack:
        if key not in self.stacks:
            self.stacks[key] = _Stack(self._take(self._needed(key)))
        return self.stacks[key]

    def _stack_for(self, k: int, key: Key) -> Key | None:
        """A stack that has a layer for a buffer which kernel k, or one soon, reads on its own: one
        that is there, or that is read later and for which there is room."""
        stacks = self.stacks_of.get(key, [])
        for stack in stacks:
            if stack in self.stacks:
                return stack
        room = self.room - sum(self.images[i].nbytes for i in self._waiting())
        for stack in stacks:
            j = next((j for j in reversed(self.reads[stack]) if j >= k), None)
            late = j is not None and self.around[j] == self.around[k]
            if late and self._needed(stack).nbytes <= room:
                return stack
        return None

    def _waiting(self) -> set[int]:
        """The images of stacks that are not read yet."""
        return {s.image for key, s in self.stacks.items() if key not in self.held and not s.read}

    def _let_go(self, key: Key) -> None:
        image, _ = self.held.pop(key)
        owner = next((k for k, s in self.stacks.items() if s.image == image), None)
        if owner is None:
            self.free.append(image)
        elif owner == key:
            self._leave(key)
        else:
            self._free_stack(owner)

    def _leave(self, key: Key) -> None:
        """A stack was read, or will not be."""
        self.stacks[key].read = True
        self._free_stack(key)

    def _free_stack(self, key: Key) -> None:
        stack = self.stacks[key]
        if stack.read and all(image != stack.image for image, _ in self.held.values()):
            self.free.append(self.stacks.pop(key).image)

    def _copy_before(self, k: int) -> None:
        """Copy what kernel k lacks, and what the next ones will and is there already."""
        for j in self._ahead(k):
            for key in self._read(j):
                if key in self.held or self._last_written(key) >= k:
                    continue
                if j > k and self._bytes_held() + self._needed(key).nbytes > EARLY:
                    continue
                self._copy(k, key)

    def _release_after(self, k: int) -> None:
        soon = {key for j in self._ahead(k) if j > k for key in self._read(j)}
        late: list[tuple[int, Key]] = []
        for key in [key for key in self.held if key not in soon and key not in self.fixed]:
            if (j := self._next_read(k, key)) is None:
                self._let_go(key)
            else:
                late.append((j, key))
        waiting = self._waiting()
        room = self.room - sum(self.images[i].nbytes for i in waiting)
        for _, key in sorted(late):  # the sooner it is read, the less it takes to keep it
            image, _ = self.held[key]
            room -= 0 if image in waiting else self.images[image].nbytes
            if room < 0:
                self._let_go(key)

    def _next_read(self, k: int, key: Key) -> int | None:
        """The kernel after k that reads what an image holds now, if there is one."""
        reads = self.reads[key]
        while reads and reads[-1] <= k:
            reads.pop()
        return reads[-1] if reads and self._last_written(key) <= k else None

    def _ahead(self, k: int) -> Iterator[int]:
        """Kernel k and the next ones in the same loops."""
        for j in range(k, min(k + self.ahead, len(self.plan.kernels))):
            if self.around[j] != self.around[k]:
                break
            yield j

    def _bytes_held(self) -> int:
        images = {image for image, _ in self.held.values()} | {
            s.image for s in self.stacks.values()
        }
        return sum(self.images[i].nbytes for i in images)

    def _take(self, needed: Image) -> int:
        """A free image of that width with enough rows and layers, at most twice as many, else a
        new one."""
        fitting = [i for i in self.free if _fits(self.images[i], needed)]
        if fitting:
            best = min(fitting, key=lambda i: (self.images[i].nbytes, i))
            self.free.remove(best)
            return best
        self.images.append(needed)
        return len(self.images) - 1


def _fits(image: Image, needed: Image) -> bool:
    same = (image.texel, image.width) == (needed.texel, needed.width)
    rows = needed.rows <= image.rows <= 2 * needed.rows
    return same and rows and needed.layers <= image.layers <= 2 * needed.layers
