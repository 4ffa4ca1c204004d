"""Runs plans on devices through wgpu. It knows plans, never graphs."""

from .adapter import Adapter as Adapter
from .adapter import adapters as adapters
from .buffers import DeviceBuffer as DeviceBuffer
from .device import Counters as Counters
from .device import Device as Device
from .device import open_device as open_device
from .device import synchronize as synchronize
from .errors import DeviceError as DeviceError
from .errors import DonatedError as DonatedError
from .errors import KernelError as KernelError
from .executor import Executable as Executable
from .handed import Handed as Handed
