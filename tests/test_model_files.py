"""Model files: what is read, and what damaged and hostile ones give."""

import json
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eggpu.importers import ModelFileError, open_folder, open_gguf, open_safetensors
from eggpu.importers.formats import FORMATS
from eggpu.importers.packed import Packed, pack

sys.path.insert(0, str(Path(__file__).parent))
from model_files import gguf_bytes, safetensors_bytes

ARRAYS = {
    "f32": ("F32", np.arange(6, dtype=np.float32).reshape(2, 3)),
    "f64": ("F64", np.array([1.5, -2.0])),
    "f16": ("F16", np.array([[0.5, -1.25]], np.float16)),
    "i64": ("I64", np.array([1, -7])),
    "u8": ("U8", np.array([0, 255], np.uint8)),
    "bool": ("BOOL", np.array([True, False])),
    "empty": ("F32", np.zeros((0, 4), np.float32)),
    "scalar": ("F32", np.array(2.5, np.float32)),
}


def written(tmp_path, data, name="model.safetensors"):
    path = tmp_path / name
    path.write_bytes(data)
    return path


def q8_0(values):
    """Blocks of 32 numbers that are exact in Q8_0 with a scale of 0.5."""
    codes = np.asarray(values, np.int8).reshape(-1, 32)
    scale = np.full((len(codes), 1), 0.5, np.float16).view(np.uint8)
    return np.concatenate([scale, codes.view(np.uint8)], 1).tobytes()


def test_safetensors_of_every_dtype(tmp_path):
    found = open_safetensors(written(tmp_path, safetensors_bytes(ARRAYS)))
    assert list(found) == list(ARRAYS)
    for name, (_, values) in ARRAYS.items():
        got = found[name].numpy()
        assert got.shape == values.shape
        assert np.array_equal(got, values)
    assert found["i64"].numpy().dtype == np.int32


def test_doubles_beyond_float32_are_infinite_and_any_nan_is_one(tmp_path):
    bits = np.array([1e300, -1e300, 1.0, 0.0]).view(np.uint64)
    bits[3] = 0x7FF0_0000_0000_0001  # a signaling NaN
    data = {"x": ("F64", bits.view(np.float64))}
    found = open_safetensors(written(tmp_path, safetensors_bytes(data)))["x"].numpy()
    np.testing.assert_array_equal(found, np.float32([np.inf, -np.inf, 1, np.nan]))


def test_bfloat_and_eight_bit_floats(tmp_path):
    exact = np.array([1.0, -2.5, 3e38, 0.0], np.float32)
    brain = (exact.view(np.uint32) >> 16).astype(np.uint16)
    small = np.array([0x00, 0x38, 0x7E, 0x7F, 0x80 | 0x08, 0x01], np.uint8)
    wide = np.array([0x3C, 0x7C, 0x7E, 0x01], np.uint8)
    data = {"b": ("BF16", brain), "e4m3": ("F8_E4M3", small), "e5m2": ("F8_E5M2", wide)}
    found = open_safetensors(written(tmp_path, safetensors_bytes(data)))
    assert np.allclose(found["b"].numpy(), exact, rtol=2**-7)
    np.testing.assert_array_equal(
        found["e4m3"].numpy(), np.float32([0, 1, 448, np.nan, -(2**-6), 2**-9])
    )
    np.testing.assert_array_equal(found["e5m2"].numpy(), np.float32([1, np.inf, np.nan, 2**-16]))


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [("I32", "i4"), ("I16", "i2"), ("I8", "i1"), ("U64", "u8"), ("U32", "u4"), ("U16", "u2")],
)
def test_integers_of_every_width(tmp_path, dtype, kind):
    info = np.iinfo(kind)
    least, most = max(info.min, -(2**31)), min(info.max, 2**32 - 1 if kind[0] == "u" else 2**31 - 1)
    values = np.array([least, 0, 5, most], kind)
    path = written(tmp_path, safetensors_bytes({"w": (dtype, values)}))
    got = open_safetensors(path)["w"].numpy()
    assert got.dtype == (np.uint32 if kind[0] == "u" else np.int32)
    assert got.tolist() == values.tolist()
    if info.max > most:
        path = written(tmp_path, safetensors_bytes({"w": (dtype, np.array([info.max], kind))}))
        with pytest.raises(ModelFileError, match=r"w: U64.* need more than 32 bits"):
            open_safetensors(path)["w"].numpy()


@pytest.mark.parametrize(
    ("dtype", "codes", "want"),
    [
        ("F8_E8M0", [127, 130, 0, 255], [1, 8, 2**-127, np.nan]),
        ("F8_E4M3FNUZ", [0x40, 0x80, 0x7F, 0x01, 0xC0], [1, np.nan, 240, 2**-10, -1]),
        ("F8_E5M2FNUZ", [0x40, 0x80, 0x7F, 0xC0], [1, np.nan, 57344, -1]),
        ("F4", [0x12, 0x7F, 0x80, 0x9A], [1, 0.5, -6, 6, 0, -0.0, -1, -0.5]),
        # four codes of 6 bits in three bytes: 8, 31, 32 + 1, 0
        ("F6_E2M3", [0xC8, 0x17, 0x02], [1, 7.5, -0.125, 0]),
        ("F6_E3M2", [0xC8, 0x17, 0x02], [0.5, 28, -0.0625, 0]),
    ],
)
def test_small_floats(tmp_path, dtype, codes, want):
    raw = np.array(codes, np.uint8)
    span = {"dtype": dtype, "shape": [len(want)], "data_offsets": [0, len(codes)]}
    path = written(tmp_path, safetensors_bytes({"w": ("U8", raw)}, {"w": span}))
    np.testing.assert_array_equal(open_safetensors(path)["w"].numpy(), np.float32(want))


def test_complex_numbers_are_refused_by_name(tmp_path):
    path = written(tmp_path, safetensors_bytes({"w": ("C64", np.zeros(2, np.complex64))}))
    with pytest.raises(ModelFileError, match="'w' has the dtype 'C64'; known are"):
        open_safetensors(path)


def test_sixteen_bit_matrices_stay_packed(tmp_path):
    values = np.arange(12, dtype=np.float16).reshape(3, 4) / 8
    found = open_safetensors(written(tmp_path, safetensors_bytes({"w": ("F16", values)})))
    matrix = found.matrix("w", (3, 4))
    assert isinstance(matrix, Packed)
    assert matrix.nbytes == values.nbytes
    assert np.array_equal(matrix.dequantize().numpy(), values)
    assert np.array_equal(matrix.rows(1, 3).dequantize().numpy(), values[1:])


def test_sharded_folders(tmp_path):
    for k, name in enumerate(("a", "b")):
        values = np.full((2,), k, np.float32)
        data = safetensors_bytes({name: ("F32", values)})
        written(tmp_path, data, f"model-0000{k + 1}.safetensors")
    index = {"weight_map": {"a": "model-00001.safetensors", "b": "model-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    found = open_folder(tmp_path)
    assert found.config == {"model_type": "llama"}
    assert found.weights["b"].numpy().tolist() == [1, 1]
    for wrong, message in (
        ("../model-00002.safetensors", "which is not there"),
        ("model-00001.safetensors", "tensor 'b' is not in"),
    ):
        index["weight_map"]["b"] = wrong
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(ModelFileError, match=message):
            open_folder(tmp_path)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 99]}}, "'w' needs 16 bytes"),
        ({"w": {"dtype": "F32", "shape": [4], "data_offsets": [16, 32]}}, "'w' lies at bytes"),
        (
            {"w": {"dtype": "F32", "shape": [4], "data_offsets": [-16, 0]}},
            "'w' has the data_offsets",
        ),
        ({"w": {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 16]}}, "'w' needs"),
        ({"w": {"dtype": "F32", "shape": [-4], "data_offsets": [0, 16]}}, "'w' needs at most"),
        ({"w": {"dtype": "Q9", "shape": [4], "data_offsets": [0, 16]}}, "'w' has the dtype 'Q9'"),
        ({"w": {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}}, "'w' needs integers"),
        ({"w": [1]}, "'w' needs dtype"),
        ([1], "needs a JSON object"),
    ],
)
def test_wrong_safetensors_name_the_tensor(tmp_path, header, message):
    given_ = {"w": ("F32", np.zeros(4, np.float32))}
    path = written(tmp_path, safetensors_bytes(given_, header))
    with pytest.raises(ModelFileError, match=message):
        open_safetensors(path)


def test_missing_and_misshapen_tensors_are_named(tmp_path):
    found = open_safetensors(written(tmp_path, safetensors_bytes({"a.w": ARRAYS["f32"]})))
    with pytest.raises(ModelFileError, match=r"no tensor 'a\.v'; beside it are a\.w"):
        found.array("a.v", (2, 3))
    with pytest.raises(
        ModelFileError, match=r"'a.w' needs the shape \[3, 2\], got a.w: F32\[2, 3\]"
    ):
        found.array("a.w", (3, 2))


@pytest.mark.parametrize("version", [2, 3])
def test_gguf(tmp_path, version):
    metadata = {
        "general.architecture": "llama",
        "n": 7,
        "x": 0.5,
        "yes": True,
        "t": ["é", "b"],
        "i": [3, -4],
    }
    values = np.arange(64) - 32
    tensors = {
        "f": ("F32", (2, 2), np.arange(4, dtype=np.float32).tobytes()),
        "q": ("Q8_0", (2, 32), q8_0(values)),
    }
    found = open_gguf(written(tmp_path, gguf_bytes(metadata, tensors, version), "m.gguf"))
    assert found.metadata == metadata
    assert found.architecture == "llama"
    assert found.get("{arch}.missing", 5) == 5
    assert found.weights["f"].numpy().tolist() == [[0, 1], [2, 3]]
    matrix = found.weights.matrix("q", (2, 32))
    assert isinstance(matrix, Packed)
    assert np.array_equal(matrix.dequantize().numpy(), values.reshape(2, 32) / 2)


def test_wrong_gguf_names_what_is_wrong(tmp_path):
    tensors = {"w": ("F32", (2, 2), bytes(16))}
    good = gguf_bytes({"k": 1}, tensors)

    def fails(data, message):
        with pytest.raises(ModelFileError, match=message):
            open_gguf(written(tmp_path, data, "m.gguf"))

    fails(good[:-1], "tensor 'w' lies at bytes")
    fails(b"GGML" + good[4:], "no GGUF file")
    fails(good[:4] + struct.pack("<I", 9) + good[8:], "versions 2 and 3 are read, got 9")
    fails(good[:8] + struct.pack("<Q", 2**60) + good[16:], "tensors do not fit the file")
    fails(good[:16] + struct.pack("<Q", 2**60) + good[24:], "metadata entries do not fit")
    fails(good[:24] + struct.pack("<Q", 2**63) + good[32:], "needs 9223372036854775808 bytes")
    huge = gguf_bytes({}, {"w": ("F32", (2**40, 2**40), bytes(16))})
    fails(huge, "tensor 'w' lies at bytes")
    odd = gguf_bytes({}, {"w": ("Q4_0", (2, 33), bytes(64))})
    fails(odd, "'w' needs rows of a multiple of 32")
    at = good.index(struct.pack("<QQ", 2, 2)) + 16  # after the dimensions
    fails(good[:at] + struct.pack("<I", 99) + good[at + 4 :], "'w' has the unknown type 99")
    fails(b"", "no GGUF file")


FUZZED = {
    "safetensors": (safetensors_bytes(ARRAYS), open_safetensors, lambda f: f),
    "gguf": (
        gguf_bytes(
            {"general.architecture": "llama", "t": ["a", "bc"], "n": 3, "i": [1, 2]},
            {"f": ("F32", (3,), bytes(12)), "q": ("Q8_0", (1, 32), q8_0(range(32)))},
        ),
        open_gguf,
        lambda f: f.weights,
    ),
}


@pytest.mark.parametrize("kind", FUZZED)
@settings(max_examples=250)
@given(data=st.data())
def test_damaged_files_give_model_file_errors(tmp_path_factory, kind, data):
    good, open_, weights = FUZZED[kind]
    damaged = bytearray(good)
    for _ in range(data.draw(st.integers(0, 3))):
        at = data.draw(st.integers(0, len(good) - 1))
        damaged[at] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        at, wide = data.draw(st.integers(0, len(good) - 9)), data.draw(st.integers(0, 2**64 - 1))
        damaged[at : at + 8] = struct.pack("<Q", wide)
    damaged = (
        damaged[: data.draw(st.integers(0, len(good)))] if data.draw(st.booleans()) else damaged
    )
    path = tmp_path_factory.getbasetemp() / f"fuzzed.{kind}"
    path.write_bytes(bytes(damaged))
    try:
        for tensor in weights(open_(path)).values():
            assert tensor.offset + tensor.nbytes <= len(damaged)
            tensor.numpy()
    except ModelFileError:
        pass


@pytest.mark.parametrize("name", FORMATS)
def test_blocks_on_the_device_are_what_numpy_says(name):
    import eggpu as eg

    f = FORMATS[name]
    rng = np.random.default_rng(1)
    rows, columns = 6, 3 * f.block
    raw = rng.integers(0, 256, (rows * 3, f.nbytes), np.uint8)
    parts = f.apart(raw)
    assert parts.codes.shape == (rows * 3, f.block)
    assert parts.codes.max() < 1 << sum(f.planes)
    # float16 of any bits may be infinite: keep the exponents small
    for at in _halves(name):
        raw[:, at + 1] &= 0x3B
    matrix = pack(raw, name, (rows, columns))
    x = rng.normal(size=(2, columns)).astype(np.float32)
    ids = np.array([5, 0, 5], np.int32)
    run = eg.compile(lambda m, x, i: (x @ m.dequantize().T, eg.take(m.dequantize(), i, 0)))
    product, picked = run(matrix, x, ids)
    want = matrix.dequantize().numpy()
    assert np.array_equal(picked.numpy(), want[ids])
    np.testing.assert_allclose(
        product.numpy(), x @ want.T, rtol=1e-4, atol=1e-4 * np.abs(want).max()
    )
    # nothing but products and gathers: the matrix is never written out
    assert len(run.plan.kernels) == 2
    assert all(b.role in ("input", "output", "constant") for b in run.plan.buffers)


def _halves(name):
    return {
        "Q4_1": [0, 2], "Q5_1": [0, 2], "Q2_K": [80, 82], "Q3_K": [108], "Q4_K": [0, 2],
        "Q5_K": [0, 2], "Q6_K": [208],
    }.get(name, [0])  # fmt: skip


# ---- whole folders

CONFIG_VALUES = [
    None, -1, 0, 1, 3, 7, 10**9, 2**63, 1.5, float("nan"), True, "x", "", [], [1, 2], {}, {"a": 1},
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from model_files import tiny_folder

    return tiny_folder(tmp_path_factory.mktemp("fuzzed") / "model")


@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_damaged_folders_give_model_file_errors(folder, data):
    from eggpu.generate import load_language_model

    name = data.draw(
        st.sampled_from(["config.json", "tokenizer.json", "tokenizer_config.json"]), "file"
    )
    path = folder / name
    good = path.read_bytes()
    values = json.loads(good)
    if data.draw(st.booleans(), "a value"):
        known = list(values)
        if name == "config.json":
            known += ["head_dim", "sliding_window", "rope_scaling", "rope_theta", "layer_types"]
            known += ["rope_parameters", "attn_logit_softcapping", "hidden_activation"]
        key = data.draw(st.sampled_from(known), "key")
        values[key] = data.draw(st.sampled_from(CONFIG_VALUES), "value")
        damaged = json.dumps(values).encode()
    else:
        damaged = bytearray(good)
        for _ in range(data.draw(st.integers(1, 3))):
            damaged[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(bytes(damaged))
    try:
        load_language_model(str(folder))
    except ModelFileError:
        pass
    finally:
        path.write_bytes(good)
