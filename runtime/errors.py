"""What the runtime raises: no usable device, a value used after donation, an impossible kernel."""

from __future__ import annotations


class DeviceError(RuntimeError):
    """No adapter fits, a device lacks what a plan needs, or it ran out of memory."""


class DonatedError(RuntimeError):
    """A buffer was used after a call that it was donated to."""


class KernelError(RuntimeError):
    """A kernel breaks a limit of the device, or its WGSL does not compile."""
