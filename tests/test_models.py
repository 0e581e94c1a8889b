"""Configurations and weights of models: what is read, refused, counted and written."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from jaxqla.models import QwenConfig, QwenForCausalLM, load
from tests import checkpoints


def assert_same(model, other):
    pairs = zip(jax.tree.leaves(nnx.state(model)), jax.tree.leaves(nnx.state(other)), strict=True)
    for x, y in pairs:
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("kind", checkpoints.KINDS)
def test_several_files_are_one(kind, checkpoint, tmp_path):
    config = checkpoints.config(kind)
    model, report = load(checkpoints.write(tmp_path, config, checkpoints.tensors(config), files=3))
    assert sorted(report.mapped) == sorted(checkpoints.tensors(config))
    assert_same(model, load(checkpoint(kind))[0])


def test_fused_experts_are_those_one_by_one(checkpoint, tmp_path):
    config = checkpoints.config("moe")
    folder = checkpoints.write(tmp_path, config, checkpoints.fused(checkpoints.tensors(config)))
    assert_same(load(folder)[0], load(checkpoint("moe"))[0])


def test_a_vision_tower_is_skipped_and_told(checkpoint, tmp_path):
    config = checkpoints.config("dense")
    folder = checkpoints.write(tmp_path, *checkpoints.multimodal(config, checkpoints.tensors(config)))
    model, report = load(folder)
    assert report.skipped == ["model.visual.patch_embed.proj.weight"]
    assert report.unknown == []
    assert_same(model, load(checkpoint("dense"))[0])


def test_a_head_for_more_tokens_is_loaded(tmp_path):
    config = checkpoints.config("dense", mtp_num_hidden_layers=1)
    predictor = checkpoints.predictor(config)
    _, report = load(checkpoints.write(tmp_path, config, checkpoints.tensors(config) | predictor))
    assert {name for name in report.mapped if name.startswith("mtp.")} == predictor.keys()
    assert report.skipped == report.unknown == []


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"model_type": "qwen4_exp_text"}, r"model_type must be one of .*'qwen3_next'.*, got 'qwen4_exp_text'"),
        ({"model_type": "llama"}, "model_type must be one of .*, got 'llama'"),
        ({"model_type": None}, "model_type must be one of .*, got None"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config must be absent; load .*, got 'fp8'"),
        ({"hidden_act": "gelu"}, "hidden_act must be 'silu', got 'gelu'"),
        ({"attention_bias": True}, "attention_bias must be False, got True"),
        ({"attn_output_gate": False}, "attn_output_gate must be True, got False"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope_type must be 'default', got 'yarn'"),
        ({"layer_types": ["linear_attention", "sliding_attention"] * 2}, "layer_types must have 4 entries, each "),
        ({"num_hidden_layers": 3}, "layer_types must have 3 entries, each "),
        ({"hidden_size": ...}, r"source must have hidden_size and num_hidden_layers, got \['hidden_size'\]"),
    ],
    ids=str,
)
@pytest.mark.parametrize("nested", [False, True])
def test_a_configuration_that_is_not_built_is_refused_by_name(change, text, nested):
    source = {key: x for key, x in (checkpoints.config("dense") | change).items() if x is not ...}
    if nested:
        source = {"model_type": "qwen3_5", "text_config": source}
    with pytest.raises(ValueError, match=f"^QwenConfig.from_hf: {text}"):
        QwenConfig.from_hf(source)


def test_older_rotary_settings_are_refused_too():
    source = checkpoints.config("next", rope_scaling={"type": "linear", "factor": 2.0})
    with pytest.raises(ValueError, match="rope_type must be 'default', got 'linear'"):
        QwenConfig.from_hf(source)


def test_fp8_is_refused_by_name(tmp_path):
    config = checkpoints.config("dense")
    folder = checkpoints.write(tmp_path, config, checkpoints.tensors(config))
    name = "model.layers.0.mlp.up_proj.weight"
    as_float8(folder / "model.safetensors", name)
    with pytest.raises(ValueError, match=rf"^load: {name} must have a dtype of .*unquantised checkpoint, got F8_E4M3"):
        load(folder)


def as_float8(path, name):
    """Gives a tensor of a file the dtype of FP8 checkpoints, keeping its shape; the format is length, JSON, bytes."""
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header, tensors = json.loads(data[8:end]), data[end:]
    begins = {key: x["data_offsets"] for key, x in header.items() if key != "__metadata__"}
    parts, at = [], 0
    for key, (begin, stop) in sorted(begins.items(), key=lambda item: item[1]):
        part = tensors[begin:stop]
        if key == name:
            header[key]["dtype"], part = "F8_E4M3", part[::4]
        header[key]["data_offsets"] = [at, at + len(part)]
        parts.append(part)
        at += len(part)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(parts))


# -- configurations ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", checkpoints.KINDS)
def test_nested_and_flat_files_are_one_configuration(kind, tmp_path):
    source = checkpoints.config(kind)
    flat = QwenConfig.from_hf(source)
    nested, _ = checkpoints.multimodal(source, {})
    assert QwenConfig.from_hf(nested) == flat
    assert QwenConfig.from_hf(source | {"of_another_time": [1], "vision_config": {"hidden_size": 3}}) == flat
    assert QwenConfig.from_hf(flat.to_hf()) == flat
    # Either level may say that the embedding is tied.
    tied = nested["tie_word_embeddings"]
    inside = {key: x for key, x in nested.items() if key != "tie_word_embeddings"}
    assert QwenConfig.from_hf(inside | {"text_config": {**source, "tie_word_embeddings": tied}}) == flat
    (tmp_path / "config.json").write_text(json.dumps(source))
    assert QwenConfig.from_hf(tmp_path) == QwenConfig.from_hf(str(tmp_path / "config.json")) == flat
    with pytest.raises(FileNotFoundError, match=r"source must be a config\.json or its folder"):
        QwenConfig.from_hf(tmp_path / "nothing")


def test_what_a_file_leaves_out():
    needed = ("model_type", "hidden_size", "num_hidden_layers", "intermediate_size")
    config = QwenConfig.from_hf({key: checkpoints.config("dense", num_hidden_layers=8)[key] for key in needed})
    assert config.layer_types == ("linear_attention", "linear_attention", "linear_attention", "full_attention") * 2
    # What transformers takes, which is not what published files say.
    assert (config.rope_theta, config.max_position_embeddings, config.tie_word_embeddings) == (1e4, 32768, False)


# Layers of both kinds, width, heads of attention and of Gated DeltaNet, parameters and those active, in 10^9.
PUBLISHED = {
    "qwen3.5-0.8b": (18, 6, 1024, (8, 2), (16, 16), 0.752, 0.752),
    "qwen3.5-2b": (18, 6, 2048, (8, 2), (16, 16), 1.882, 1.882),
    "qwen3.5-4b": (24, 8, 2560, (16, 4), (16, 32), 4.206, 4.206),
    "qwen3.5-9b": (24, 8, 4096, (16, 4), (16, 32), 8.954, 8.954),
    "qwen3.5-27b": (48, 16, 5120, (24, 4), (16, 48), 26.896, 26.896),
    "qwen3.6-27b": (48, 16, 5120, (24, 4), (16, 48), 26.896, 26.896),
    "qwen3.8-27b": (48, 16, 5120, (24, 4), (16, 48), 26.896, 26.896),
    "qwen3.5-35b-a3b": (30, 10, 2048, (16, 2), (16, 32), 34.661, 3.455),
    "qwen3.6-35b-a3b": (30, 10, 2048, (16, 2), (16, 32), 34.661, 3.455),
    "qwen3.5-122b-a10b": (36, 12, 3072, (32, 2), (16, 64), 122.112, 9.771),
    "qwen3.5-397b-a17b": (45, 15, 4096, (32, 2), (16, 64), 396.346, 17.349),
    "qwen3-next-80b-a3b": (36, 12, 2048, (16, 2), (16, 32), 79.674, 3.875),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_are_the_published_sizes(name):
    config = QwenConfig.preset(name.upper())
    gdn, attention, width, heads, gdn_heads, parameters, active = PUBLISHED[name]
    assert [config.layer_types.count(kind) for kind in ("linear_attention", "full_attention")] == [gdn, attention]
    assert config.layer_types[:4] == ("linear_attention",) * 3 + ("full_attention",)
    assert (config.hidden_size, config.block_length, config.rope_theta) == (width, 4, 1e7)
    assert (config.num_attention_heads, config.num_key_value_heads) == heads
    assert (config.linear_num_key_heads, config.linear_num_value_heads) == gdn_heads
    model = jax.eval_shape(lambda: QwenForCausalLM(config, scan_layers=True, rngs=nnx.Rngs(0)))
    count = sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))
    assert config.num_parameters() == count
    assert round(count / 1e9, 3) == parameters
    assert round(config.num_parameters(active=True) / 1e9, 3) == active


def test_presets_are_told_and_changed():
    assert QwenConfig.presets().keys() == PUBLISHED.keys()
    assert QwenConfig.preset("qwen3.5-4b", num_mtp_layers=1).num_mtp_layers == 1
    with pytest.raises(ValueError, match=r"name must be one of qwen3\.5-0\.8b, .*, got 'qwen2-7b'"):
        QwenConfig.preset("qwen2-7b")


def test_parameters_of_a_head_for_more_tokens_are_counted():
    for kind in ("dense", "moe"):
        config = QwenConfig.from_hf(checkpoints.config(kind, mtp_num_hidden_layers=1))
        model = jax.eval_shape(lambda config=config: QwenForCausalLM(config, rngs=nnx.Rngs(0)))
        count = sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))
        assert config.num_parameters() == count


# -- what is saved -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scan_layers", [False, True])
@pytest.mark.parametrize("kind", checkpoints.KINDS)
def test_what_is_loaded_is_saved_bit_for_bit(kind, scan_layers, tmp_path):
    config = checkpoints.config(kind, mtp_num_hidden_layers=1)
    tensors = checkpoints.tensors(config) | checkpoints.predictor(config)
    model = QwenForCausalLM.from_pretrained(
        checkpoints.write(tmp_path / "in", config, tensors), scan_layers=scan_layers
    )
    model.save_pretrained(tmp_path / "out")
    saved = load_file(tmp_path / "out" / "model.safetensors")
    assert saved.keys() == tensors.keys()
    for name, x in tensors.items():
        np.testing.assert_array_equal(saved[name], x, err_msg=name)
    assert QwenConfig.from_hf(tmp_path / "out") == model.config == QwenConfig.from_hf(config)


def test_bfloat16_keeps_its_bits_and_is_computed_in(tmp_path):
    config = checkpoints.config("dense")
    folder = checkpoints.write(tmp_path / "in", config, checkpoints.tensors(config))
    model = QwenForCausalLM.from_pretrained(folder, param_dtype=jnp.bfloat16)
    model.save_pretrained(tmp_path / "out")
    # No dtype is named: that of the file is kept, and computed in.
    again = QwenForCausalLM.from_pretrained(tmp_path / "out")
    assert_same(again, model)
    names = {"A_log", "dt_bias", "linear_attn.norm.weight"}
    kept = {name for name, x in load_file(tmp_path / "out" / "model.safetensors").items() if x.dtype == np.float32}
    assert {name.split("linear_attn.")[0] for name in kept} == {"model.layers.0.", "model.layers.2."}
    assert {name for name in kept if not any(name.endswith(end) for end in names)} == set()
    hidden, _ = jax.eval_shape(lambda: again.hidden_states(jnp.zeros((2, 3), jnp.int32)))
    assert hidden.dtype == jnp.bfloat16
