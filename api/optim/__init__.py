"""Optimizers, learning-rate schedules and gradient clipping, all traced into the compiled step.

An optimizer is a value: `state = opt.init(model)` once, then in each step
`model, state = opt.update(model, state, grads)`. Formulas are those of torch.optim. Only float
leaves change, and of those no states of modules (running statistics).
"""

from eggpu.optim.adaptive import Adafactor as Adafactor
from eggpu.optim.adaptive import AdafactorState as AdafactorState
from eggpu.optim.adaptive import Adam as Adam
from eggpu.optim.adaptive import AdamState as AdamState
from eggpu.optim.adaptive import RMSprop as RMSprop
from eggpu.optim.adaptive import RMSpropState as RMSpropState
from eggpu.optim.adaptive import adafactor as adafactor
from eggpu.optim.adaptive import adam as adam
from eggpu.optim.adaptive import adamw as adamw
from eggpu.optim.adaptive import rmsprop as rmsprop
from eggpu.optim.clipping import Clipped as Clipped
from eggpu.optim.clipping import clip_by_global_norm as clip_by_global_norm
from eggpu.optim.clipping import clip_by_value as clip_by_value
from eggpu.optim.clipping import clipped as clipped
from eggpu.optim.clipping import global_norm as global_norm
from eggpu.optim.momentum import SGD as SGD
from eggpu.optim.momentum import Lion as Lion
from eggpu.optim.momentum import LionState as LionState
from eggpu.optim.momentum import SGDState as SGDState
from eggpu.optim.momentum import lion as lion
from eggpu.optim.momentum import sgd as sgd
from eggpu.optim.schedules import Rate as Rate
from eggpu.optim.schedules import Scalar as Scalar
from eggpu.optim.schedules import Schedule as Schedule
from eggpu.optim.schedules import constant as constant
from eggpu.optim.schedules import cosine as cosine
from eggpu.optim.schedules import linear as linear
from eggpu.optim.schedules import one_cycle as one_cycle
from eggpu.optim.schedules import rate as rate
from eggpu.optim.schedules import step_decay as step_decay
from eggpu.optim.schedules import warmup as warmup
from eggpu.optim.trees import Optimizer as Optimizer
from eggpu.optim.wrappers import EMA as EMA
from eggpu.optim.wrappers import Accumulated as Accumulated
from eggpu.optim.wrappers import AccumulationState as AccumulationState
from eggpu.optim.wrappers import EMAState as EMAState
from eggpu.optim.wrappers import Frozen as Frozen
from eggpu.optim.wrappers import FrozenState as FrozenState
from eggpu.optim.wrappers import Groups as Groups
from eggpu.optim.wrappers import GroupsState as GroupsState
from eggpu.optim.wrappers import Scaled as Scaled
from eggpu.optim.wrappers import ScaledState as ScaledState
from eggpu.optim.wrappers import accumulate as accumulate
from eggpu.optim.wrappers import ema as ema
from eggpu.optim.wrappers import finite as finite
from eggpu.optim.wrappers import frozen as frozen
from eggpu.optim.wrappers import groups as groups
from eggpu.optim.wrappers import scaled as scaled
