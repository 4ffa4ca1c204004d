"""Files that were made to harm: each gives an error that says what is wrong, and takes little."""

from __future__ import annotations

import json
import struct
import time
import tracemalloc
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model_files import _text, gguf_bytes, tiny_folder

from eggpu.generate import chat, load_language_model
from eggpu.generate.tokenizer import from_gguf
from eggpu.importers import ModelFileError, open_gguf, open_safetensors
from eggpu.models.auto import load_model

MOST = 32 << 20  # bytes that reading a file of a few may take


class Bounded:
    """Fails where what is inside took much memory or time."""

    def __enter__(self):
        tracemalloc.start()
        self.began = time.process_time()

    def __exit__(self, *_):
        took = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert took < MOST
        assert time.process_time() - self.began < 5


def safetensors(path, header, data=bytes(16)):
    text = header if isinstance(header, bytes) else header.encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def entry(first, last, shape="[2]", dtype="F32"):
    return f'{{"dtype":"{dtype}","shape":{shape},"data_offsets":[{first},{last}]}}'


SAFETENSORS = {
    "a name twice": (f'{{"w":{entry(0, 8)},"w":{entry(8, 16)}}}', "'w' is there twice"),
    "a key twice": ('{"w":{"dtype":"F32","dtype":"F32"}}', "'dtype' is there twice"),
    "shared bytes": (f'{{"w":{entry(0, 8)},"v":{entry(4, 12)}}}', "'w' and 'v' overlap at byte"),
    "the same bytes": (f'{{"w":{entry(0, 8)},"v":{entry(0, 8)}}}', "'w' and 'v' overlap"),
    "nothing, but too much of it": (
        f'{{"w":{entry(0, 0, f"[0,{2**70}]")}}}',
        "'w' has too long axes",
    ),
    "nested deep": ("[" * 100_000, "holds no JSON"),
    "no text": (b'{"\xff":1}', "holds no JSON"),
    "digits": (f'{{"w":{entry(0, 8, "[" + "9" * 5000 + "]")}}}', "holds no JSON"),
    "fewer digits": (f'{{"w":{entry(0, 8, "[" + "9" * 4000 + "]")}}}', "'w'"),
    "no number": (f'{{"w":{entry(0, 8, "[NaN]")}}}', "'w' needs integers"),
    "far away": (f'{{"w":{entry(2**90, 2**90 + 8)}}}', "'w' lies at bytes"),
    "many axes": (f'{{"w":{entry(0, 4, [1] * 5000)}}}', "'w' needs at most 8 axes"),
}


@pytest.mark.parametrize("name", SAFETENSORS)
def test_safetensors(tmp_path, name):
    header, message = SAFETENSORS[name]
    path = safetensors(tmp_path / "m.safetensors", header)
    with Bounded(), pytest.raises(ModelFileError, match=message):
        open_safetensors(path)


def test_tensors_without_elements_are_read(tmp_path):
    many = {f"t{k}": {"dtype": "F32", "shape": [0, k], "data_offsets": [0, 0]} for k in range(50)}
    found = open_safetensors(safetensors(tmp_path / "m.safetensors", json.dumps(many), b""))
    assert [t.numpy().shape for t in found.values()] == [(0, k) for k in range(50)]


def test_what_is_no_file(tmp_path):
    import os

    os.mkfifo(tmp_path / "pipe")  # to open it would wait for a writer
    for path in (tmp_path, tmp_path / "pipe", tmp_path / "none", "/dev/zero"):
        for read in (open_safetensors, open_gguf):
            with pytest.raises(ModelFileError, match="is no file"):
                read(path)


def gguf(path, pairs=b"", count=0, tensors=b"", number=0, data=bytes(64)):
    head = b"GGUF" + struct.pack("<IQQ", 3, number, count) + pairs + tensors
    path.write_bytes(head + bytes(-len(head) % 32) + data)
    return path


def pair(key, kind, raw):
    return _text(key) + struct.pack("<I", kind) + raw


def array(inner, count, raw=b""):
    return struct.pack("<IQ", inner, count) + raw


def nested(depth):
    return array(9, 1, nested(depth - 1)) if depth else array(0, 1, b"\1")


def tensor(name, shape, kind, offset):
    return _text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


METADATA = {
    "an array nested deep": (pair("k", 9, nested(500)), "'k' has the unknown type 9"),
    "a giant array": (pair("k", 9, array(0, 2**40)), "1099511627776 entries of 'k' do not fit"),
    "giant texts": (pair("k", 9, array(8, 2**61)), "entries of 'k' do not fit"),
    "giant arrays": (pair("k", 9, array(9, 2**62)), "entries of 'k' do not fit"),
    "a giant text": (pair("k", 8, struct.pack("<Q", 2**62)), "k needs 4611686018427387904 bytes"),
    "a key that is no text": (struct.pack("<Q2sIB", 2, b"\xff\xfe", 0, 1), "not UTF-8"),
    "a text that is none": (pair("k", 8, struct.pack("<Q2s", 2, b"\xff\xfe")), "not UTF-8"),
    "a token that is none": (
        pair("k", 9, array(8, 1, struct.pack("<Q2s", 2, b"\xff\xfe"))), "not UTF-8"),
    "an unknown type": (pair("k", 13, b"\0" * 8), "'k' has the unknown type 13"),
}  # fmt: skip
TENSORS = {
    "a name twice": (tensor("w", (2,), 0, 0) * 2, "'w' is there twice"),
    "shared bytes": (
        tensor("w", (10,), 0, 0) + tensor("v", (2,), 0, 32), "'w' and 'v' overlap at byte"),
    "a type that is gone": (tensor("w", (32,), 4, 0), "'w' has the unknown type 4"),
    "a type of later": (tensor("w", (256,), 34, 0), "'w' has the unknown type 34"),
    "more than there is": (tensor("w", (2**63,) * 4, 0, 0), "'w' lies at bytes"),
    "nothing, but too much": (tensor("w", (0, 2**63, 2**63), 0, 0), "'w' has too long axes"),
    "far away": (tensor("w", (2,), 0, 2**63), "'w' lies at bytes"),
    "a name without end": (tensor("w" * 2000, (2,), 0, 0), "name has 2000 characters"),
}  # fmt: skip


@pytest.mark.parametrize("name", METADATA)
def test_metadata(tmp_path, name):
    pairs, message = METADATA[name]
    with Bounded(), pytest.raises(ModelFileError, match=message):
        open_gguf(gguf(tmp_path / "m.gguf", pairs, 1))


@pytest.mark.parametrize("name", TENSORS)
def test_tensors(tmp_path, name):
    tensors, message = TENSORS[name]
    count = tensors.count(struct.pack("<Q", 1) + b"w") + (b"v" in tensors)
    with Bounded(), pytest.raises(ModelFileError, match=message):
        open_gguf(gguf(tmp_path / "m.gguf", b"", 0, tensors, max(count, 1)))


def test_blocks_without_rows_or_columns(tmp_path):
    tensors = tensor("a", (32, 0), 2, 0) + tensor("b", (0, 4), 2, 0) + tensor("c", (), 0, 0)
    found = open_gguf(gguf(tmp_path / "m.gguf", b"", 0, tensors, 3)).weights
    assert [t.numpy().shape for t in found.values()] == [(0, 32), (4, 0), ()]


# ---- folders


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_folder(tmp_path_factory.mktemp("hostile") / "model")


def indexed(folder, tmp_path, text):
    """A copy of the folder whose tensors lie in a.safetensors, with this index."""
    made = tmp_path / "model"
    made.mkdir()
    for file in folder.iterdir():
        name = "a.safetensors" if file.name == "model.safetensors" else file.name
        (made / name).write_bytes(file.read_bytes())
    (made / "model.safetensors.index.json").write_text(text)
    return made


@pytest.mark.parametrize(
    "name",
    [
        "../secret.safetensors", "/etc/passwd", "..", ".", "", "sub/../../secret.safetensors",
        "a.safetensors\0", "..\\secret.safetensors", "a" * 5000, "loop.safetensors",
    ],
    ids=lambda n: repr(n[:30]),
)  # fmt: skip
def test_an_index_names_files_of_its_folder_only(folder, tmp_path, name):
    names = list(open_safetensors(folder / "model.safetensors"))
    (tmp_path / "secret.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    found = dict.fromkeys(names, "a.safetensors") | {names[0]: name}
    made = indexed(folder, tmp_path, json.dumps({"weight_map": found}))
    (made / "loop.safetensors").symlink_to("loop.safetensors")
    with pytest.raises(ModelFileError, match="which is not there"):
        load_language_model(str(made))


def test_an_index_that_is_cut(folder, tmp_path):
    names = list(open_safetensors(folder / "model.safetensors"))
    whole = json.dumps({"weight_map": dict.fromkeys(names, "a.safetensors")})
    made = indexed(folder, tmp_path, whole)
    load_language_model(str(made))
    for text, message in (
        (whole[: len(whole) // 2], "holds no JSON"),
        ('{"weight_map": {"x": 3}}', "needs a weight_map"),
        ("{}", "needs a weight_map"),
        (json.dumps({"weight_map": {names[0]: "a.safetensors"}}), "has no tensor"),
    ):
        (made / "model.safetensors.index.json").write_text(text)
        with pytest.raises(ModelFileError, match=message):
            load_language_model(str(made))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 10**9}, "rotary positions need an even size from 2 to 65536"),
        ({"num_hidden_layers": 2**31 - 1}, "at most 4096 are read"),
        ({"rms_norm_eps": float("nan")}, "a finite number 'rms_norm_eps', got nan"),
        ({"rms_norm_eps": 10**400}, "a finite number 'rms_norm_eps'"),
        ({"hidden_act": "__class__"}, "the activation '__class__' is not known"),
        ({"rope_theta": float("inf")}, "a base above 0"),
        ({"partial_rotary_factor": 4.0}, "turns 32 elements of heads of 8"),
        ({"eos_token_id": "x", "vocab_size": 10**9}, "needs the shape"),
    ],
    ids=str,
)
def test_settings_that_ask_for_too_much(folder, tmp_path, change, message):
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    with Bounded(), pytest.raises(ModelFileError, match=message):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("kind", "key"),
    [("whisper", "decoder_layers"), ("gpt2", "n_layer"), ("bert", "num_hidden_layers"),
     ("vit", "num_hidden_layers")],
)  # fmt: skip
def test_layers_of_other_models_are_bounded(folder, tmp_path, kind, key):
    sizes = ("vocab_size", "hidden_size", "d_model", "n_embd", "n_head", "encoder_layers",
             "intermediate_size", "encoder_ffn_dim", "encoder_attention_heads",
             "num_attention_heads")  # fmt: skip
    config = dict.fromkeys(sizes, 8) | {"model_type": kind, key: 2**31 - 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    with Bounded(), pytest.raises(ModelFileError, match="at most 4096 are read"):
        load_model(tmp_path)


# ---- what a GGUF file says of its model and tokenizer

VALUES = [0, 1, 3, 2**31, 0.5, float("nan"), True, "x", "", ["a"], [1, -2]]
GGUF_MODEL = {
    "general.architecture": "llama", "llama.context_length": 64, "llama.embedding_length": 32,
    "llama.block_count": 1, "llama.feed_forward_length": 48, "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2, "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.dimension_count": 8, "llama.rope.freq_base": 1e4,
    "llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0,
    "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a", "b", "ab", "c"],
    "tokenizer.ggml.merges": ["a b"], "tokenizer.ggml.token_type": [1, 1, 1, 3],
    "tokenizer.ggml.eos_token_id": 3, "tokenizer.ggml.bos_token_id": 3,
    "tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.pre": "llama-bpe",
}  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_metadata_of_any_kind_gives_model_file_errors(tmp_path_factory, data):
    changed = dict(GGUF_MODEL)
    for key in data.draw(st.lists(st.sampled_from(list(changed)), min_size=1, max_size=2), "keys"):
        changed[key] = data.draw(st.sampled_from(VALUES), "value")
    path = tmp_path_factory.getbasetemp() / "said.gguf"
    path.write_bytes(gguf_bytes(changed, {"token_embd.weight": ("F32", (4, 32), bytes(512))}))
    for read in (load_model, lambda p: from_gguf(open_gguf(p)).encode("ab c")):
        with suppress(ModelFileError):
            read(path)


# ---- chat templates

GROWING = "{% set ns = namespace(s='xxxxxxxxxx') %}{% for i in range(60) %}{% set ns.s = "
TEMPLATES = [
    "{{ 'x' * 10**11 }}", "{{ 10**10 * ['x'] }}", "{{ 'x'.ljust(10**11) }}", "{{ lipsum(n=9999) }}",
    "{{ '%099999999999d' % 1 }}", "{{ '%099999999999d'|format(1) }}", "{{ '%*d' % (10**10, 1) }}",
    "{{ '{:>99999999999}'.format(1) }}", "{{ '{0:{1}}'.format(1, 10**11) }}",
    "{{ 'x'|center(10**11) }}", "{{ 9**(9**9) }}", "{{ 'a\nb'|indent(10**11) }}",
    "{{ (5).to_bytes(10**11, 'big') }}", "{{ strftime_now('%099999999d') }}",
    GROWING + "ns.s ~ ns.s %}{% endfor %}", GROWING + "ns.s + ns.s %}{% endfor %}",
    GROWING + "[ns.s, ns.s] %}{% endfor %}{{ ns.s }}",
    GROWING + "[ns.s, ns.s] %}{% endfor %}{{ ns.s|tojson|length }}",
    GROWING + "ns.s|replace('x', 'xx') %}{% endfor %}",
    GROWING + "ns.s.replace('', 'xx') %}{% endfor %}",
    GROWING + "ns.s.join([ns.s, ns.s, ns.s]) %}{% endfor %}",
    GROWING + "[ns.s, ns.s, ns.s]|join(ns.s) %}{% endfor %}",
    "{% set s = 'xxxxxxxxxx' %}" + "{% set s %}{{ s }}{{ s }}{% endset %}" * 60,
    "{% for i in range(90000) %}{{ 'x' * 5000 }}{% endfor %}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}",
    "{% for i in range(90000) %}{% for j in range(90000) %}{% continue %}{% endfor %}{% endfor %}",
    "{% for i in range(90000) recursive %}{{ loop(range(90000)) }}{% endfor %}",
    "{% macro f(n) %}{% if n %}{% set a = f(n-1), f(n-1) %}{% endif %}{% endmacro %}{{ f(60) }}",
]  # fmt: skip


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda t: t[:60])
def test_templates_make_no_more_than_they_may(template):
    tracemalloc.start()
    with pytest.raises(ModelFileError, match="chat template"):
        chat.render(template, [{"role": "user", "content": "hi"}])
    assert tracemalloc.get_traced_memory()[1] < 400 << 20
    tracemalloc.stop()


def test_what_templates_do_gives_what_jinja_gives():
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    messages = [{"role": "system", "content": " a\nb "}, {"role": "user", "content": "hi"}]
    text = (
        "{% set ns = namespace(s='') %}{% for m in messages[::-1] %}"
        "{% set ns.s = ns.s ~ m.content|trim ~ loop.index0 %}{% endfor %}{{ ns.s + '!' }}"
        "{% macro f(x) %}<{{ x|upper }}>{% endmacro %}{{ f('a') ~ f('b') }}{% set t %}{{ 1 }}"
        "{% endset %}{{ t }} {{ messages|map(attribute='role')|join(', ') }} {{ 3 * 4 }} {{ 2**9 }}"
        "{{ 7 % 4 }} {{ '-' * 5 }} {{ [1] + [2] }} {{ '%s=%05d'|format('k', 7) }} {{ '%s' % 'q' }} "
        "{{ '{} {:>4}'.format('a', 3) }} {{ 'a\nb'|indent(2) }} {{ '-'.join(['a', 'b']) }} "
        "{{ 'aXb'.replace('X', '--') }} {{ 'aXb'|replace('X', '+') }} {{ {'k': [1, none]} }} "
        "{{ range(3)|list }} {{ [3, 1]|sort }} {{ {'a': 1}.items()|list }} {{ none }} {{ true }}"
    )
    plain = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    want = plain.from_string(text).render(messages=messages)
    assert chat.render(text, messages) == want
    assert chat.render("{{ [1]|tojson(indent=10**9) }}", []) == "[\n" + " " * 16 + "1\n]"
