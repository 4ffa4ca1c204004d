"""Devices, their memory, and what is refused before the driver sees it."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from eggpu.runtime import Device, DeviceBuffer, DeviceError, adapters, open_device
from eggpu.runtime.buffers import bucket
from eggpu.runtime.limits import element_pointer, nesting, workgroup_bytes

STORED = {"f32": 4, "f16": 2, "i32": 4, "u32": 4, "bool": 4}


@pytest.fixture(scope="module")
def device() -> Device:
    """No device fails the tests: nothing here skips."""
    return open_device()


def values(n, seed=0):
    return np.random.default_rng(seed).standard_normal(n).astype(np.float32)


# copies between host and device


@pytest.mark.parametrize("n", [1, 2, 3, 1023, 1025, 300_001])
@pytest.mark.parametrize("dtype", ["f32", "f16", "i32", "u32", "bool"])
def test_upload_then_download(device, dtype, n):
    numpy_dtype = {"f32": "f4", "f16": "f2", "i32": "i4", "u32": "u4", "bool": "?"}[dtype]
    x = np.random.default_rng(n).integers(0, 2 if dtype == "bool" else 1000, n).astype(numpy_dtype)
    stored = device.upload(x)
    assert stored.nbytes == -(-n * STORED[dtype] // 4) * 4
    got = device.download(stored, (n,), dtype)
    assert got.dtype == x.dtype
    np.testing.assert_array_equal(got, x)


def test_bool_is_stored_as_words(device):
    stored = device.upload(np.array([True, False, True]))
    np.testing.assert_array_equal(device.download(stored, (3,), "u32"), [1, 0, 1])


def test_upload_of_views_and_scalars(device):
    x = values(120).reshape(10, 12)
    for array in (x.T, x[::2, ::-1], x.astype(">f4"), np.float32(3.5), np.asfortranarray(x)):
        got = device.download(device.upload(array), np.shape(array), "f32")
        np.testing.assert_array_equal(got, array)


def test_upload_of_bytes(device):
    stored = device.upload_bytes(b"\x01\x02\x03\x04\x05")
    np.testing.assert_array_equal(device.download(stored, (2,), "u32"), [0x04030201, 5])


def test_download_of_a_part(device):
    before = device.counters.copy()
    stored = device.upload(np.arange(1000, dtype=np.float32))
    np.testing.assert_array_equal(device.download(stored, (3,), "f32"), [0, 1, 2])
    assert device.counters.since(before)["download_bytes"] == 12
    assert device.counters.since(before)["upload_bytes"] == 4000


def test_copies_in_many_pieces_through_staging_memory(device, monkeypatch):
    """What devices do whose memory cannot be mapped."""
    from eggpu.runtime import buffers

    monkeypatch.setattr(buffers, "_CHUNK", 1 << 12)
    monkeypatch.setattr(device, "mappable", False)
    x = values(10_001)
    stored = device.upload(x)
    np.testing.assert_array_equal(device.download(stored, (10_001,), "f32"), x)
    assert device.download(stored, (1,), "f32") == x[0]


def test_download_needs_enough_bytes_and_a_known_dtype(device):
    stored = device.upload(values(3))
    with pytest.raises(ValueError, match=r"f32\[4\] needs 16 bytes, the buffer has 12"):
        device.download(stored, (4,), "f32")
    with pytest.raises(TypeError, match="needs one of f32, f16, i32, u32, bool, got f64"):
        device.download(stored, (1,), "f64")
    with pytest.raises(TypeError, match=r"needs float32.*got float64"):
        device.upload(np.zeros(3))


def test_buffers_describe_themselves(device):
    made = device.upload(values(3))
    assert isinstance(made, DeviceBuffer)
    assert repr(made).startswith("DeviceBuffer(12 bytes, storage ")


# memory


def test_memory_is_reused_and_can_be_dropped(device):
    first = device.alloc(1 << 20)
    serial = first.storage.serial
    del first
    before = device.counters.copy()
    again = device.alloc((1 << 20) - 100)
    assert again.storage.serial == serial
    assert "buffers_created" not in device.counters.since(before)
    del again
    device.trim()
    assert device.pool.free == 0
    assert device.alloc(1 << 20).storage.serial != serial


def test_buckets_waste_little():
    for n in [*range(1, 5000), 10**6 + 1, 10**9 + 7]:
        assert n <= bucket(n) <= max(256, n * 1.125 + 4)
        assert bucket(n) % 4 == 0
        assert bucket(bucket(n)) == bucket(n)


def test_out_of_memory_is_an_error(device, monkeypatch):
    device.trim()
    monkeypatch.setattr(device.pool, "limit", device.pool.allocated + 1000)
    with pytest.raises(DeviceError, match="out of memory: 1048576 bytes needed"):
        device.alloc(1 << 20)
    with pytest.raises(DeviceError, match="holds at most"):
        device.alloc(device.target.max_buffer_bytes + 4)


# what is refused


def test_workgroup_memory_is_read_from_the_source():
    source = """
const TM = 64u;
const TK : u32 = 16u;
const PAD = TM + 1u;
var<workgroup> a: array<f32, TK * PAD>;
var<workgroup> b: array<vec4<f32>, 32>;
var<workgroup> c: atomic<u32>;
var<workgroup> d: array<array<f16, 4>, TM / 2>;
var<workgroup> e: vec3f;
"""
    assert workgroup_bytes(source) == 4 * 16 * 65 + 16 * 32 + 4 + 2 * 4 * 32 + 16
    assert workgroup_bytes("var<workgroup> s: Tile;") is None
    assert workgroup_bytes("fn main() {}") == 0


def test_dangerous_pointers_are_told_from_harmless_ones():
    assert element_pointer("let y = f(&b0[1]);") is not None
    assert element_pointer("g(x, &s.m)") is not None
    for harmless in ("atomicAdd(&b0[i], 1u)", "f(&whole)", "f(a & b[i])", "(a && b[i])"):
        assert element_pointer(harmless) is None
    assert nesting("f((a[b]){c})") == 3


# devices


def test_the_target_is_probed(device):
    target = device.target
    assert "OpenGL" not in target.backend
    assert target.features == tuple(sorted(target.features))
    assert (target.subgroup > 0) == ("subgroup" in target.features)
    assert target.max_buffer_bytes % 4 == 0
    if "llvmpipe" in target.name:
        assert target.kind == "cpu"
        assert target.subgroup == int(target.name.split(" bits")[0].split()[-1]) // 32
        assert target.loop_limit in (0, 65535)


def test_devices_are_chosen_by_name_or_index(device):
    listed = adapters()
    assert [a.index for a in listed] == list(range(len(listed)))
    assert open_device("0") is device
    assert open_device(listed[0].name[:6].upper()) is device
    with pytest.raises(DeviceError, match="no device has the index or a name with 'nothing'"):
        open_device("nothing")
    with pytest.raises(DeviceError, match="backend needs vulkan, metal, dx12 or gl"):
        open_device(backend="cuda")


def run_python(code, **environment):
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def test_without_an_adapter_the_error_says_what_to_install():
    code, out, _ = run_python(
        "from eggpu.runtime import DeviceError, open_device\n"
        "try:\n    open_device()\nexcept DeviceError as error:\n    print(error)\n",
        VK_DRIVER_FILES="/nonexistent",
        VK_ICD_FILENAMES="/nonexistent",
    )
    assert code == 0
    assert "no Vulkan, Metal or DX12 adapter was found" in out
    assert "apt-get install mesa-vulkan-drivers" in out


def test_an_adapter_of_opengl_alone_is_not_used_unasked(monkeypatch):
    from eggpu.runtime import adapter, native

    class OnlyOpenGL:
        info = {  # noqa: RUF012
            "device": "some GL",
            "backend_type": "OpenGL",
            "adapter_type": "Unknown",
            "description": "",
            "vendor": "",
        }

    found = {False: [], True: [OnlyOpenGL()]}
    monkeypatch.setattr(native, "enumerate_adapters", lambda opengl=False: found[opengl])
    with pytest.raises(DeviceError, match="OpenGL offers some GL, used only when backend is 'gl'"):
        adapter.choose(None, None)
    assert adapter.choose(None, "gl")[0].name == "some GL"
    found[True] = []
    with pytest.raises(DeviceError, match="mesa-vulkan-drivers"):
        adapter.choose(None, "gl")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_is_told_to_open_its_own_device():
    code, out, _ = run_python(
        "import os, numpy as np\n"
        "from eggpu.runtime import DeviceError, open_device\n"
        "device = open_device()\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    try:\n        device.upload(np.zeros(3, np.float32))\n"
        "    except DeviceError as error:\n        print(error, flush=True)\n"
        "    os._exit(0)\n"
        "os.waitpid(child, 0)\n"
    )
    assert code == 0
    assert "opened before a fork" in out


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_process_forked_while_other_threads_work_does_not_hang():
    code, out, err = run_python(
        "import os, signal, threading, numpy as np\n"
        "import eggpu as eg\n"
        "x = eg.put(np.ones(3, np.float32))\n"
        "known, new = eg.compile(lambda x: x * 2), eg.compile(lambda x: eg.exp(x) @ x)\n"
        "known(x), eg.compile(lambda x: eg.tanh(x) @ x)(x)\n"
        "ready, end = threading.Event(), threading.Event()\n"
        "def hold():\n"
        "    with eg.device().lock:\n"
        "        ready.set()\n        end.wait()\n"
        "threading.Thread(target=hold).start()\n"
        "ready.wait()\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    signal.alarm(20)\n"
        "    for f in (known, new):\n"
        "        try:\n            f(x)\n"
        "        except eg.DeviceError as error:\n            print(error, flush=True)\n"
        "    os._exit(0)\n"
        "status = os.waitpid(child, 0)[1]\n"
        "end.set()\n"
        "print(status)\n"
    )
    assert code == 0, err
    assert out.count("opened before a fork") == 2
    assert out.splitlines()[-1] == "0"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize(
    ("end", "status"), [("sys.exit(3)", 3), ("pass", 0), ("raise ValueError", 1)]
)
def test_a_forked_process_ends_as_it_wants_to(end: str, status: int):
    """The engine of the e-graph, too, has threads that are not there any more."""
    code, out, err = run_python(
        "import os, signal, sys, numpy as np\n"
        "import eggpu as eg\n"
        "f = eg.compile(lambda x: eg.tanh(x) @ x, cache=False)\n"
        "x = np.ones(3, np.float32)\n"
        "f(x)\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    signal.alarm(20)\n"
        "    from eggpu.compiler.egraph.engine import Engine\n"
        "    try:\n        Engine().run('(sort A)')\n"
        "    except eg.CompileError as error:\n        print(error, flush=True)\n"
        f"    {end}\n"
        "else:\n"
        "    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), f(x).numpy())\n"
    )
    assert code == 0, err
    told, result = out.splitlines()
    assert "used the e-graph before it was forked to this one" in told
    assert result.startswith(f"{status} ")


def test_the_process_ends_cleanly_with_work_under_way():
    code, _, err = run_python(
        "import numpy as np\n"
        "from eggpu.runtime import open_device\n"
        "device = open_device()\n"
        "kept = [device.upload(np.zeros(1 << 20, np.float32)) for _ in range(3)]\n"
        "device.upload(np.zeros(3, np.float32))\n"
    )
    assert code == 0
    assert "Traceback" not in err


LEAVES = """
import numpy as np, eggpu as eg
x = np.ones((64, 64), np.float32)
for i in range(4):
    y = eg.compile(lambda x, i=i: eg.nn.softmax(x * (i + 2.0)) @ x, cache=False)(x)
"""


def test_a_process_may_end_while_the_device_computes() -> None:
    done = subprocess.run([sys.executable, "-c", LEAVES], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
