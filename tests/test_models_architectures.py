"""Every architecture on small random checkpoints, written and run by transformers."""

import numpy as np
import pytest

import eggpu as eg
from eggpu.generate import Generator
from eggpu.models.auto import load_model

pytestmark = [
    pytest.mark.models,
    pytest.mark.timeout(600),
    pytest.mark.xdist_group("architectures"),
]

IDS = np.random.default_rng(0).integers(3, 90, (2, 24)).astype(np.int32)
BASE = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
NARROW = {"head_dim": 16}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
LONG = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0, 1.1, 1.3, 1.7],
    "long_factor": [1.0, 2.0, 3.0, 4.0], "factor": 2.0, "original_max_position_embeddings": 32,
}  # fmt: skip

# name: (class, config class, settings besides BASE)
LANGUAGE = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", {}),
    "llama-3": ("LlamaForCausalLM", "LlamaConfig", {"rope_parameters": LLAMA3}),
    "llama-yarn": ("LlamaForCausalLM", "LlamaConfig", {"rope_parameters": YARN}),
    "llama-bias": ("LlamaForCausalLM", "LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("MistralForCausalLM", "MistralConfig", {"sliding_window": 7}),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", NARROW),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", NARROW),
    "gemma2": (
        "Gemma2ForCausalLM", "Gemma2Config",
        {**NARROW, "sliding_window": 6, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 5.0,
         "final_logit_softcapping": 3.0},
    ),
    "gemma3": (
        "Gemma3ForCausalLM", "Gemma3TextConfig",
        {**NARROW, "sliding_window": 6, "query_pre_attn_scalar": 24, "num_hidden_layers": 6},
    ),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", {"sliding_window": 9}),
    "phi3-long": (
        "Phi3ForCausalLM", "Phi3Config",
        {"rope_parameters": LONG, "original_max_position_embeddings": 32},
    ),
    "gpt2": (
        "GPT2LMHeadModel", "GPT2Config",
        {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64},
    ),
}  # fmt: skip


def checkpoint(folder, name, config_name, settings, inputs, dtype=None):
    """A random model saved to a folder, and what transformers computes."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, config_name)(**settings)
    model = getattr(transformers, name)(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.05)
    if dtype:
        model = model.to(getattr(torch, dtype))
    model.save_pretrained(folder)
    if dtype:  # read again: only the weights are rounded, not the rotary rates
        model = type(model).from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        out = model(**{k: torch.tensor(v) for k, v in inputs.items()})
    values = out.logits if hasattr(out, "logits") else out.last_hidden_state
    return values.numpy()


def run(model, *inputs):
    return eg.compile(lambda m, *a: m(*a), name="model")(model, *inputs).numpy()


@pytest.mark.parametrize("name", LANGUAGE)
def test_language_models(tmp_path, name):
    kind, config, changes = LANGUAGE[name]
    settings = changes if kind.startswith("GPT2") else BASE | changes
    settings = {"vocab_size": 96} | settings
    want = checkpoint(tmp_path, kind, config, settings, {"input_ids": IDS.astype(np.int64)})
    model = load_model(tmp_path, context=32)
    np.testing.assert_allclose(run(model, IDS), want, atol=2e-5)
    # with a cache, in chunks, both rows at once
    session = Generator(model, batch=2, context=32, sizes=(1, 8)).start(IDS[:, :20].tolist())
    assert session.token.tolist() == want[:, 19].argmax(-1).tolist()
    for k in range(20, 24):
        session.feed(IDS[:, k : k + 1].tolist())
        assert session.token.tolist() == want[:, k].argmax(-1).tolist()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sixteen_bit_checkpoints(tmp_path, dtype):
    kind, config, _ = LANGUAGE["llama"]
    inputs = {"input_ids": IDS.astype(np.int64)}
    want = checkpoint(tmp_path, kind, config, BASE, inputs, dtype)
    np.testing.assert_allclose(run(load_model(tmp_path), IDS), want, atol=2e-5)


def test_sharded_checkpoints(tmp_path):
    import transformers

    kind, config, _ = LANGUAGE["llama"]
    inputs = {"input_ids": IDS.astype(np.int64)}
    want = checkpoint(tmp_path / "whole", kind, config, BASE, inputs)
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "whole")
    model.save_pretrained(tmp_path / "parts", max_shard_size="20KB")
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) > 2
    np.testing.assert_allclose(run(load_model(tmp_path / "parts"), IDS), want, atol=2e-5)


def test_bert(tmp_path):
    mask = np.arange(24)[None] < np.array([[24], [17]])
    inputs = {"input_ids": IDS.astype(np.int64), "attention_mask": mask.astype(np.int64)}
    settings = {k: v for k, v in BASE.items() if k != "num_key_value_heads"}
    want = checkpoint(tmp_path, "BertModel", "BertConfig", settings, inputs)
    got = run(load_model(tmp_path), IDS, mask)
    np.testing.assert_allclose(got[mask], want[mask], atol=2e-5)


PIXELS = np.random.default_rng(1).normal(size=(2, 3, 32, 32)).astype(np.float32)
IMAGE = {
    "vit": (
        "ViTForImageClassification", "ViTConfig",
        {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
         "num_attention_heads": 4, "image_size": 32, "patch_size": 8},
    ),
    "resnet-bottleneck": (
        "ResNetForImageClassification", "ResNetConfig",
        {"embedding_size": 8, "hidden_sizes": [16, 32], "depths": [2, 1],
         "layer_type": "bottleneck"},
    ),
    "resnet-basic": (
        "ResNetForImageClassification", "ResNetConfig",
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 2], "layer_type": "basic"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", IMAGE)
def test_image_models(tmp_path, name):
    kind, config, settings = IMAGE[name]
    settings = {**settings, "num_labels": 5}
    want = checkpoint(tmp_path, kind, config, settings, {"pixel_values": PIXELS})
    np.testing.assert_allclose(run(load_model(tmp_path), PIXELS), want, atol=2e-5)


def test_whisper(tmp_path):
    settings = {
        "vocab_size": 96, "num_mel_bins": 8, "d_model": 32, "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48,
        "decoder_ffn_dim": 48, "max_source_positions": 20, "max_target_positions": 30,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3,
        "suppress_tokens": [], "begin_suppress_tokens": [],
    }  # fmt: skip
    heard = np.random.default_rng(2).normal(size=(1, 8, 40)).astype(np.float32)
    inputs = {"input_features": heard, "decoder_input_ids": IDS[:1, :12].astype(np.int64)}
    want = checkpoint(
        tmp_path, "WhisperForConditionalGeneration", "WhisperConfig", settings, inputs
    )
    model = load_model(tmp_path)
    np.testing.assert_allclose(run(model, heard, IDS[:1, :12]), want, atol=2e-5)
    from eggpu.models.whisper import Listener

    keys = eg.compile(lambda m, x: m.hear(x), name="hear")(model, heard)
    session = Generator(Listener(model, keys), context=16, sizes=(1, 8)).start(
        IDS[:1, :11].tolist()
    )
    assert session.token.tolist() == want[:, 10].argmax(-1).tolist()
    session.feed(IDS[:1, 11:12].tolist())
    assert session.token.tolist() == want[:, 11].argmax(-1).tolist()


def test_unknown_architectures_are_named(tmp_path):
    from eggpu.importers import ModelFileError

    checkpoint(tmp_path, "BertModel", "BertConfig", {
        k: v for k, v in BASE.items() if k != "num_key_value_heads"
    }, {"input_ids": IDS.astype(np.int64)})  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace('"bert"', '"ernie"'))
    with pytest.raises(ModelFileError, match="the model_type 'ernie'; known are bert, gemma"):
        load_model(tmp_path)
