"""Tiny checkpoints of Qwen hybrids in Hugging Face's names and layouts, with weights away from where they start.

Written with numpy alone, so that every environment has them; transformers loads them without a missing or an unexpected
tensor (`test_models_parity.py`).
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

KINDS = ("dense", "tied", "moe", "next")
LAYERS = ("linear_attention", "full_attention") * 2
ROPE = {"rope_type": "default", "rope_theta": 10_000_000.0, "partial_rotary_factor": 0.25}
Tensors = dict[str, np.ndarray]


def config(kind: str, **changes: Any) -> dict[str, Any]:
    """The `config.json` of a kind: no two sizes alike."""
    fields = {
        "vocab_size": 96,
        "hidden_size": 32,
        "num_hidden_layers": len(LAYERS),
        "layer_types": list(LAYERS),
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 20,
        "linear_value_head_dim": 24,
        "linear_conv_kernel_dim": 4,
        "rms_norm_eps": 1e-6,
        "initializer_range": 0.02,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": kind == "tied",
        "max_position_embeddings": 512,
        "rope_parameters": ROPE | {"mrope_section": [1, 1, 0], "mrope_interleaved": True},
        # Published files have keys that no implementation reads.
        "attn_output_gate": True,
        "mamba_ssm_dtype": "float32",
        "eos_token_id": None,
    }
    experts = {
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 36,
        "shared_expert_intermediate_size": 28,
    }
    if kind in ("dense", "tied"):
        fields |= {"model_type": "qwen3_5_text", "architectures": ["Qwen3_5ForCausalLM"], "intermediate_size": 40}
    elif kind == "moe":
        fields |= experts | {"model_type": "qwen3_5_moe_text", "architectures": ["Qwen3_5MoeForCausalLM"]}
    else:
        # Flat rotary settings, as files of that time have them; a dense layer among the others.
        fields |= experts | {"model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"]}
        fields |= {"intermediate_size": 40, "mlp_only_layers": [1], "decoder_sparse_step": 1, "norm_topk_prob": False}
        fields |= {key: ROPE[key] for key in ("rope_theta", "partial_rotary_factor")}
        del fields["rope_parameters"]
    return fields | changes


def tensors(config: dict[str, Any], *, seed: int = 0) -> Tensors:
    """The weights, float32; experts one by one."""
    rng = np.random.default_rng(seed)
    return {name: _draw(rng, name, shape) for name, shape in _shapes(config).items()}


def predictor(config: dict[str, Any], *, seed: int = 1) -> Tensors:
    """Those of a multi-token-prediction head of one layer."""
    D = config["hidden_size"]
    shapes = {"mtp.fc.weight": (D, 2 * D)}
    shapes |= {f"mtp.{name}.weight": (D,) for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")}
    shapes |= _layer(config, "mtp.layers.0.", "full_attention", "num_experts" in config)
    rng = np.random.default_rng(seed)
    return {name: _draw(rng, name, shape) for name, shape in shapes.items()}


def fused(tensors: Tensors) -> Tensors:
    """The same weights with the experts of a layer in two tensors, as published Qwen3.5 files have them."""
    fused = {name: x for name, x in tensors.items() if ".experts." not in name}
    for prefix in dict.fromkeys(name.split(".experts.")[0] for name in tensors if ".experts." in name):

        def stack(part: str, prefix: str = prefix) -> np.ndarray:
            names = [name for name in tensors if name.startswith(f"{prefix}.experts.") and part in name]
            return np.stack([tensors[name] for name in names])

        fused[f"{prefix}.experts.gate_up_proj"] = np.concatenate([stack("gate_proj"), stack("up_proj")], axis=1)
        fused[f"{prefix}.experts.down_proj"] = stack("down_proj")
    return fused


def multimodal(config: dict[str, Any], tensors: Tensors) -> tuple[dict[str, Any], Tensors]:
    """The same model as published: text fields nested, text weights under another prefix, a vision tower beside."""
    outer = {
        "model_type": config["model_type"].removesuffix("_text"),
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "tie_word_embeddings": config["tie_word_embeddings"],
        "text_config": {name: x for name, x in config.items() if name != "tie_word_embeddings"},
        "vision_config": {"depth": 1, "hidden_size": 8},
    }
    renamed = {f"model.language_{name}" if name.startswith("model.") else name: x for name, x in tensors.items()}
    return outer, {**renamed, "model.visual.patch_embed.proj.weight": np.ones((8, 3), np.float32)}


def write(folder: Path, config: dict[str, Any], tensors: Tensors, *, files: int = 1) -> Path:
    """Writes a folder: one file, or several and their index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if files == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    weight_map = {}
    for i in range(files):
        name = f"model-{i + 1:05}-of-{files:05}.safetensors"
        part = {key: tensors[key] for key in list(tensors)[i::files]}
        save_file(part, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def _shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    D, vocab = config["hidden_size"], config["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, D), "model.norm.weight": (D,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, D)
    for i, kind in enumerate(config["layer_types"]):
        sparse = "num_experts" in config and i not in config.get("mlp_only_layers", [])
        shapes |= _layer(config, f"model.layers.{i}.", kind, sparse)
    return shapes


def _layer(config: dict[str, Any], prefix: str, kind: str, sparse: bool) -> dict[str, tuple[int, ...]]:
    D = config["hidden_size"]
    H, HV, K, V = (
        config[f"linear_{x}"] for x in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
    )
    N, G, width = (config[x] for x in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    channels = 2 * H * K + HV * V
    shapes: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (D,), "post_attention_layernorm.weight": (D,)}
    if kind == "full_attention":
        shapes |= {
            "self_attn.q_proj.weight": (N * 2 * width, D),
            "self_attn.k_proj.weight": (G * width, D),
            "self_attn.v_proj.weight": (G * width, D),
            "self_attn.o_proj.weight": (D, N * width),
            "self_attn.q_norm.weight": (width,),
            "self_attn.k_norm.weight": (width,),
        }
    else:
        if config["model_type"] == "qwen3_next":
            shapes |= {
                "linear_attn.in_proj_qkvz.weight": (channels + HV * V, D),
                "linear_attn.in_proj_ba.weight": (2 * HV, D),
            }
        else:
            shapes |= {
                "linear_attn.in_proj_qkv.weight": (channels, D),
                "linear_attn.in_proj_z.weight": (HV * V, D),
                "linear_attn.in_proj_b.weight": (HV, D),
                "linear_attn.in_proj_a.weight": (HV, D),
            }
        shapes |= {
            "linear_attn.conv1d.weight": (channels, 1, config["linear_conv_kernel_dim"]),
            "linear_attn.A_log": (HV,),
            "linear_attn.dt_bias": (HV,),
            "linear_attn.norm.weight": (V,),
            "linear_attn.out_proj.weight": (D, HV * V),
        }
    if sparse:
        shapes |= {"mlp.gate.weight": (config["num_experts"], D), "mlp.shared_expert_gate.weight": (1, D)}
        shapes |= _swiglu("mlp.shared_expert.", D, config["shared_expert_intermediate_size"])
        for e in range(config["num_experts"]):
            shapes |= _swiglu(f"mlp.experts.{e}.", D, config["moe_intermediate_size"])
    else:
        shapes |= _swiglu("mlp.", D, config["intermediate_size"])
    return {prefix + name: shape for name, shape in shapes.items()}


def _swiglu(prefix: str, D: int, F: int) -> dict[str, tuple[int, ...]]:
    up = {f"{prefix}{name}_proj.weight": (F, D) for name in ("gate", "up")}
    return up | {f"{prefix}down_proj.weight": (D, F)}


def _draw(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    # Nothing at its initial value, or a norm with 1 + w in the place of w, or a forgotten bias, would not show.
    if name.endswith("A_log"):
        x = np.log(rng.uniform(0.5, 8, shape))
    elif name.endswith("dt_bias"):
        x = rng.uniform(-4, 0.5, shape)
    elif name.endswith("linear_attn.norm.weight"):
        x = 1 + 0.2 * rng.standard_normal(shape)
    elif len(shape) == 1:
        x = 0.2 * rng.standard_normal(shape)
    elif name.endswith("conv1d.weight"):
        x = 0.4 * rng.standard_normal(shape)
    elif "embed_tokens" in name:
        x = rng.standard_normal(shape)
    else:
        x = rng.standard_normal(shape) / shape[-1] ** 0.5
    return x.astype(np.float32)
