#!/usr/bin/env bash
# Sees to it that Vulkan finds at least one device. Where there is none it installs Mesa's drivers
# (lavapipe among them, which runs on the CPU) if this user may, and says what to run if not.
set -euo pipefail
cd "$(dirname "$0")/.."

python=.venv/bin/python
[ -x "$python" ] || python=${PYTHON:-python3}
packages="mesa-vulkan-drivers libvulkan1"

# Asks the Vulkan loader itself: driver files on disk do not tell whether one of them has a device.
has_adapter() {
    "$python" - >/dev/null 2>&1 <<'PYTHON'
import ctypes, sys

vulkan = ctypes.CDLL("libvulkan.so.1")
VK_STRUCTURE_TYPE_INSTANCE_CREATE_INFO = 1


class InstanceCreateInfo(ctypes.Structure):
    _fields_ = [
        ("type", ctypes.c_uint32), ("next", ctypes.c_void_p), ("flags", ctypes.c_uint32),
        ("application", ctypes.c_void_p),
        ("layer_count", ctypes.c_uint32), ("layers", ctypes.c_void_p),
        ("extension_count", ctypes.c_uint32), ("extensions", ctypes.c_void_p),
    ]


info = InstanceCreateInfo(type=VK_STRUCTURE_TYPE_INSTANCE_CREATE_INFO)
instance = ctypes.c_void_p()
if vulkan.vkCreateInstance(ctypes.byref(info), None, ctypes.byref(instance)) != 0:
    sys.exit(1)
count = ctypes.c_uint32(0)
status = vulkan.vkEnumeratePhysicalDevices(instance, ctypes.byref(count), None)
sys.exit(0 if status == 0 and count.value > 0 else 1)
PYTHON
}

root_command() { # prints nothing for root, "sudo -n" for who may use it without a password
    if [ "$(id -u)" -eq 0 ]; then
        return 0
    elif command -v sudo >/dev/null && sudo -n true 2>/dev/null; then
        echo "sudo -n"
    else
        return 1
    fi
}

install_packages() { # $1: "" or "sudo -n"
    $1 env DEBIAN_FRONTEND=noninteractive apt-get -y -o DPkg::Lock::Timeout=120 \
        install --no-install-recommends $packages </dev/null
}

if [ "$(uname -s)" != Linux ]; then
    exit 0 # Metal and Direct3D 12 come with the system
fi
if has_adapter; then
    exit 0
fi
if ! command -v apt-get >/dev/null; then
    echo "no Vulkan device found: install your GPU's Vulkan driver, or Mesa's lavapipe (CPU)" >&2
    exit 1
fi
if ! as_root=$(root_command); then
    echo "no Vulkan device found; run: sudo apt-get install $packages" >&2
    exit 1
fi

echo "no Vulkan device found: installing $packages"
log=$(mktemp)
trap 'rm -f "$log"' EXIT
if ! install_packages "$as_root" >"$log" 2>&1; then
    # A new machine has no package lists, an old list names files that are gone.
    echo "refreshing the package lists"
    if ! { $as_root apt-get update </dev/null && install_packages "$as_root"; } >"$log" 2>&1; then
        cat "$log" >&2
        echo "installing failed; run: apt-get update && apt-get install $packages" >&2
        exit 1
    fi
fi
if ! has_adapter; then
    echo "$packages are installed, but Vulkan still finds no device;" \
        "VK_DRIVER_FILES is '${VK_DRIVER_FILES:-}'" >&2
    exit 1
fi
