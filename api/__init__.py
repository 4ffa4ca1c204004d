"""eggpu: an e-graph decides the tensor program, WebGPU runs it.

>>> import eggpu as eg
>>> @eg.compile
... def norm(x):
...     return eg.sqrt((x * x).sum())
>>> float(norm(eg.array([3.0, 4.0])))
5.0
"""

from eggpu.compiler.autodiff import grad as grad
from eggpu.compiler.autodiff import value_and_grad as value_and_grad
from eggpu.compiler.autodiff import vjp as vjp
from eggpu.compiler.custom import checkpoint as checkpoint
from eggpu.compiler.custom import custom_vjp as custom_vjp
from eggpu.compiler.errors import CompileError as CompileError
from eggpu.compiler.errors import EggpuError as EggpuError
from eggpu.compiler.errors import IRError as IRError
from eggpu.compiler.errors import ShapeMismatch as ShapeMismatch
from eggpu.compiler.errors import TraceError as TraceError
from eggpu.compiler.errors import TypeMismatch as TypeMismatch
from eggpu.compiler.expect import OutOfRange as OutOfRange
from eggpu.compiler.library import random as random
from eggpu.compiler.library.einsum import einsum as einsum
from eggpu.compiler.library.indexing import one_hot as one_hot
from eggpu.compiler.library.indexing import take as take
from eggpu.compiler.library.indexing import take_along_axis as take_along_axis
from eggpu.compiler.library.linalg import dot as dot
from eggpu.compiler.library.linalg import matmul as matmul
from eggpu.compiler.library.linalg import outer as outer
from eggpu.compiler.library.linalg import tensordot as tensordot
from eggpu.compiler.library.loops import fori_loop as fori_loop
from eggpu.compiler.library.loops import scan as scan
from eggpu.compiler.library.math import abs as abs
from eggpu.compiler.library.math import acos as acos
from eggpu.compiler.library.math import add as add
from eggpu.compiler.library.math import asin as asin
from eggpu.compiler.library.math import astype as astype
from eggpu.compiler.library.math import atan as atan
from eggpu.compiler.library.math import atan2 as atan2
from eggpu.compiler.library.math import bitwise_and as bitwise_and
from eggpu.compiler.library.math import bitwise_or as bitwise_or
from eggpu.compiler.library.math import bitwise_xor as bitwise_xor
from eggpu.compiler.library.math import ceil as ceil
from eggpu.compiler.library.math import clip as clip
from eggpu.compiler.library.math import cos as cos
from eggpu.compiler.library.math import cosh as cosh
from eggpu.compiler.library.math import divide as divide
from eggpu.compiler.library.math import equal as equal
from eggpu.compiler.library.math import erf as erf
from eggpu.compiler.library.math import exp as exp
from eggpu.compiler.library.math import exp2 as exp2
from eggpu.compiler.library.math import expm1 as expm1
from eggpu.compiler.library.math import floor as floor
from eggpu.compiler.library.math import floor_divide as floor_divide
from eggpu.compiler.library.math import greater as greater
from eggpu.compiler.library.math import greater_equal as greater_equal
from eggpu.compiler.library.math import invert as invert
from eggpu.compiler.library.math import isfinite as isfinite
from eggpu.compiler.library.math import isinf as isinf
from eggpu.compiler.library.math import isnan as isnan
from eggpu.compiler.library.math import left_shift as left_shift
from eggpu.compiler.library.math import less as less
from eggpu.compiler.library.math import less_equal as less_equal
from eggpu.compiler.library.math import log as log
from eggpu.compiler.library.math import log1p as log1p
from eggpu.compiler.library.math import log2 as log2
from eggpu.compiler.library.math import log10 as log10
from eggpu.compiler.library.math import logical_and as logical_and
from eggpu.compiler.library.math import logical_not as logical_not
from eggpu.compiler.library.math import logical_or as logical_or
from eggpu.compiler.library.math import logical_xor as logical_xor
from eggpu.compiler.library.math import maximum as maximum
from eggpu.compiler.library.math import minimum as minimum
from eggpu.compiler.library.math import multiply as multiply
from eggpu.compiler.library.math import negative as negative
from eggpu.compiler.library.math import not_equal as not_equal
from eggpu.compiler.library.math import power as power
from eggpu.compiler.library.math import remainder as remainder
from eggpu.compiler.library.math import right_shift as right_shift
from eggpu.compiler.library.math import round as round
from eggpu.compiler.library.math import rsqrt as rsqrt
from eggpu.compiler.library.math import sigmoid as sigmoid
from eggpu.compiler.library.math import sign as sign
from eggpu.compiler.library.math import sin as sin
from eggpu.compiler.library.math import sinh as sinh
from eggpu.compiler.library.math import sqrt as sqrt
from eggpu.compiler.library.math import square as square
from eggpu.compiler.library.math import stop_gradient as stop_gradient
from eggpu.compiler.library.math import subtract as subtract
from eggpu.compiler.library.math import tan as tan
from eggpu.compiler.library.math import tanh as tanh
from eggpu.compiler.library.math import trunc as trunc
from eggpu.compiler.library.math import where as where
from eggpu.compiler.library.ordering import argsort as argsort
from eggpu.compiler.library.ordering import cummax as cummax
from eggpu.compiler.library.ordering import cummin as cummin
from eggpu.compiler.library.ordering import cumprod as cumprod
from eggpu.compiler.library.ordering import cumsum as cumsum
from eggpu.compiler.library.ordering import sort as sort
from eggpu.compiler.library.ordering import topk as topk
from eggpu.compiler.library.reductions import all as all
from eggpu.compiler.library.reductions import any as any
from eggpu.compiler.library.reductions import argmax as argmax
from eggpu.compiler.library.reductions import argmin as argmin
from eggpu.compiler.library.reductions import logsumexp as logsumexp
from eggpu.compiler.library.reductions import max as max
from eggpu.compiler.library.reductions import mean as mean
from eggpu.compiler.library.reductions import min as min
from eggpu.compiler.library.reductions import norm as norm
from eggpu.compiler.library.reductions import prod as prod
from eggpu.compiler.library.reductions import std as std
from eggpu.compiler.library.reductions import sum as sum
from eggpu.compiler.library.reductions import var as var
from eggpu.compiler.library.shaping import arange as arange
from eggpu.compiler.library.shaping import broadcast_to as broadcast_to
from eggpu.compiler.library.shaping import concatenate as concatenate
from eggpu.compiler.library.shaping import diag as diag
from eggpu.compiler.library.shaping import expand_dims as expand_dims
from eggpu.compiler.library.shaping import eye as eye
from eggpu.compiler.library.shaping import flip as flip
from eggpu.compiler.library.shaping import full as full
from eggpu.compiler.library.shaping import full_like as full_like
from eggpu.compiler.library.shaping import linspace as linspace
from eggpu.compiler.library.shaping import moveaxis as moveaxis
from eggpu.compiler.library.shaping import ones as ones
from eggpu.compiler.library.shaping import ones_like as ones_like
from eggpu.compiler.library.shaping import pad as pad
from eggpu.compiler.library.shaping import ravel as ravel
from eggpu.compiler.library.shaping import repeat as repeat
from eggpu.compiler.library.shaping import reshape as reshape
from eggpu.compiler.library.shaping import roll as roll
from eggpu.compiler.library.shaping import split as split
from eggpu.compiler.library.shaping import squeeze as squeeze
from eggpu.compiler.library.shaping import stack as stack
from eggpu.compiler.library.shaping import swapaxes as swapaxes
from eggpu.compiler.library.shaping import tile as tile
from eggpu.compiler.library.shaping import transpose as transpose
from eggpu.compiler.library.shaping import tril as tril
from eggpu.compiler.library.shaping import triu as triu
from eggpu.compiler.library.shaping import zeros as zeros
from eggpu.compiler.library.shaping import zeros_like as zeros_like
from eggpu.compiler.library.updates import dynamic_slice as dynamic_slice
from eggpu.compiler.library.updates import dynamic_update_slice as dynamic_update_slice
from eggpu.compiler.library.updates import gather as gather
from eggpu.compiler.library.updates import scatter_add as scatter_add
from eggpu.compiler.pipeline import Options as Options
from eggpu.compiler.pytree import tree_map as tree_map
from eggpu.compiler.tracing import Array as Array
from eggpu.compiler.tracing import array as array
from eggpu.compiler.tracing import trace as trace
from eggpu.compiler.types import Type as Type
from eggpu.compiler.types import parse_type as parse_type
from eggpu.leaves import copy as copy
from eggpu.runtime import DeviceError as DeviceError
from eggpu.runtime import DonatedError as DonatedError
from eggpu.saved import load as load
from eggpu.session import Compiled as Compiled
from eggpu.session import compile as compile
from eggpu.session import device as device
from eggpu.session import put as put
from eggpu.session import synchronize as synchronize
from eggpu.session import using as using

from eggpu import nn as nn  # isort: skip
from eggpu import optim as optim  # isort: skip
from eggpu import rules as rules  # isort: skip
from eggpu import testing as testing  # isort: skip
from eggpu.nn.torch_state import from_torch_state as from_torch_state  # isort: skip
from eggpu.nn.torch_state import to_torch_state as to_torch_state  # isort: skip

__version__ = "0.1.0"
