"""Data-parallel training: processes and devices that each take a share of every batch.

Gradients are averaged by an engine that exists: MPI through mpi4py, or torch.distributed's gloo.
"""

from eggpu.distributed.groups import DistributedError as DistributedError
from eggpu.distributed.groups import Group as Group
from eggpu.distributed.groups import init as init
from eggpu.distributed.parallel import DataParallel as DataParallel
from eggpu.distributed.parallel import share as share
from eggpu.distributed.processes import launch as launch
from eggpu.distributed.processes import local_device as local_device
