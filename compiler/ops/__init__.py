"""The op set: one declaration an op. Functions here take and give nodes of exact types; see
eggpu.compiler.library for the NumPy-like functions with promotion and broadcasting."""

from __future__ import annotations

from collections.abc import Sequence

from ..ir import Node as Node
from ..types import DType
from . import decode as decode
from . import packed as packed
from . import random as random
from .contract import dot as dot
from .contract import swap as swap
from .dynamic import dynamic_slice as dynamic_slice
from .dynamic import dynamic_update as dynamic_update
from .elementwise import ELEMENTWISE as ELEMENTWISE
from .elementwise import cast as cast
from .leaf import constant as constant
from .leaf import input_node as input_node
from .leaf import iota as iota
from .leaf import literal as literal
from .move import broadcast as broadcast
from .move import concat as concat
from .move import flip as flip
from .move import gather as gather
from .move import pad as pad
from .move import reshape as reshape
from .move import slice_ as slice_
from .move import transpose as transpose
from .reduce import reduce as reduce
from .scan import argsort as argsort
from .scan import scan as scan
from .scatter import scatter_add as scatter_add
from .scatter import scatter_set as scatter_set
from .window import conv as conv
from .window import windows as windows


def full(value: float, shape: Sequence[int], dtype: DType) -> Node:
    """A number repeated to a shape."""
    return broadcast(literal(value, dtype), shape)
