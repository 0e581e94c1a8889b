"""The shape of a model: from a Hugging Face `config.json`, or one of the published sizes by name."""

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxqla._checks import message

GDN, ATTENTION = "linear_attention", "full_attention"
# Which projection layout a checkpoint has, and whether layers are mixtures of experts, is said by these.
MODEL_TYPES = ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")


@dataclass(frozen=True)
class QwenConfig:
    """Sizes of a Qwen hybrid model: Qwen3-Next, Qwen3.5 and the later ones of the same architecture.

    Attributes:
        model_type: `"qwen3_5_text"`, `"qwen3_5_moe_text"` or `"qwen3_next"`: names and layouts of a saved checkpoint.
        vocab_size: Tokens of the vocabulary.
        hidden_size: Width of the residual stream.
        intermediate_size: Width of the MLP of dense layers; None where there is none.
        layer_types: `"linear_attention"` (Gated DeltaNet) or `"full_attention"` for each layer.
        num_attention_heads: Query heads of full attention.
        num_key_value_heads: Its key and value heads.
        head_dim: Width of its heads.
        partial_rotary_factor: Share of a head that is rotated.
        rope_theta: Base of the rotary frequencies.
        linear_num_key_heads: Key heads of Gated DeltaNet.
        linear_num_value_heads: Its value heads.
        linear_key_head_dim: Width of its keys.
        linear_value_head_dim: Width of its values.
        linear_conv_kernel_dim: Tokens its convolution sees.
        moe_layers: Indices of layers whose MLP is a mixture of experts.
        num_experts: Experts of such a layer.
        num_experts_per_tok: Experts a token goes to.
        moe_intermediate_size: Width of an expert.
        shared_expert_intermediate_size: Width of the shared expert.
        norm_topk_prob: Whether the weights of a token's experts are scaled to sum to one.
        rms_norm_eps: Of every norm.
        initializer_range: Standard deviation of new weights.
        tie_word_embeddings: Whether the output projection is the embedding.
        max_position_embeddings: Longest row that the model was made for; not enforced.
        num_mtp_layers: Layers of the head that predicts one token further; 0 for none.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    layer_types: tuple[str, ...]
    intermediate_size: int | None = None
    num_attention_heads: int = 16
    num_key_value_heads: int = 2
    head_dim: int = 256
    partial_rotary_factor: float = 0.25
    rope_theta: float = 1e7
    linear_num_key_heads: int = 16
    linear_num_value_heads: int = 32
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_conv_kernel_dim: int = 4
    moe_layers: tuple[int, ...] = ()
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    shared_expert_intermediate_size: int = 0
    norm_topk_prob: bool = True
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 262144
    num_mtp_layers: int = 0

    @classmethod
    def from_hf(cls, source: Mapping[str, Any] | str | Path) -> "QwenConfig":
        """Reads a Hugging Face configuration, text fields nested in `text_config` or flat; unknown keys are ignored.

        Args:
            source: The dictionary, a `config.json`, or a folder that has one.

        Raises:
            FileNotFoundError: There is no such file.
            ValueError: The model is of another architecture, quantised, or has an option that is not built; the message
                names it.
        """
        if isinstance(source, Mapping):
            return _from_hf(source)
        path = Path(source)
        path = path / "config.json" if path.is_dir() else path
        if not path.is_file():
            raise FileNotFoundError(message("QwenConfig.from_hf", "source", "be a config.json or its folder", path))
        return _from_hf(json.loads(path.read_text()))

    @classmethod
    def preset(cls, name: str, **changes: Any) -> "QwenConfig":
        """One of the published sizes, such as `"qwen3.5-4b"`; `QwenConfig.presets()` lists them.

        Args:
            name: In any case.
            **changes: Attributes that differ.

        Raises:
            ValueError: There is no such size.
        """
        presets = cls.presets()
        if name.lower() not in presets:
            raise ValueError(message("QwenConfig.preset", "name", f"be one of {', '.join(presets)}", repr(name)))
        return dataclasses.replace(presets[name.lower()], **changes)

    @classmethod
    def presets(cls) -> dict[str, "QwenConfig"]:
        """All published sizes by name, text models without the multi-token-prediction head."""
        return {**_PRESETS, **{alias: _PRESETS[name] for alias, name in _ALIASES.items()}}

    @property
    def num_hidden_layers(self) -> int:
        """How many layers there are."""
        return len(self.layer_types)

    @property
    def is_next(self) -> bool:
        """Whether checkpoints have the projection layout of Qwen3-Next."""
        return self.model_type == "qwen3_next"

    @property
    def block_length(self) -> int:
        """The shortest period of the kinds of layers, what a scan over blocks takes at a time."""
        kinds = [(kind, i in self.moe_layers) for i, kind in enumerate(self.layer_types)]
        n = len(kinds)
        return next(p for p in range(1, n + 1) if n % p == 0 and kinds == kinds[:p] * (n // p))

    def axis_sizes(self) -> dict[str, int]:
        """Sizes of the logical axes that a mesh has to divide, for `jaxqla.flax.use_mesh`."""
        sizes = {
            "gdn_heads": self.linear_num_key_heads,
            "heads": self.num_attention_heads,
            "kv_heads": self.num_key_value_heads,
            "vocab": self.vocab_size,
            "embed": self.hidden_size,
        }
        widths = [self.intermediate_size, self.moe_intermediate_size, self.shared_expert_intermediate_size]
        # What divides all of them divides their greatest common divisor.
        return {**sizes, "mlp": math.gcd(*(w for w in widths if w))}

    def num_parameters(self, *, active: bool = False) -> int:
        """Counts the parameters, a tied embedding once; with `active`, those that one token goes through."""
        D, N, G, width = self.hidden_size, self.num_attention_heads, self.num_key_value_heads, self.head_dim
        H, HV, K, V = (
            self.linear_num_key_heads,
            self.linear_num_value_heads,
            self.linear_key_head_dim,
            self.linear_value_head_dim,
        )
        channels = 2 * H * K + HV * V
        gdn = D * (channels + HV * V + 2 * HV) + self.linear_conv_kernel_dim * channels + 2 * HV + V + HV * V * D
        attention = D * width * (3 * N + 2 * G) + 2 * width
        dense = 3 * D * (self.intermediate_size or 0)
        experts = self.num_experts_per_tok if active else self.num_experts
        sparse = D * (self.num_experts + 1) + 3 * D * (
            experts * self.moe_intermediate_size + self.shared_expert_intermediate_size
        )
        layers = sum(
            (gdn if kind == GDN else attention) + (sparse if i in self.moe_layers else dense) + 2 * D
            for i, kind in enumerate(self.layer_types)
        )
        mlp = sparse if self.moe_layers else dense
        mtp = self.num_mtp_layers * (attention + mlp + 2 * D) + (2 * D * D + 3 * D if self.num_mtp_layers else 0)
        return layers + self.vocab_size * D * (1 if self.tie_word_embeddings else 2) + D + mtp

    def num_flops(self, num_tokens: int, num_pairs: int) -> float:
        """Counts the operations of a forward pass, a multiplication and an addition as two.

        Products with weights, the recurrences of the Gated DeltaNet layers token by token, and the scores of attention;
        a backward pass is twice as much.

        Args:
            num_tokens: Tokens, padding not counted.
            num_pairs: Pairs of a token and one that attention lets it see, itself with them: `n (n + 1) / 2` for a
                document of n tokens.
        """
        lookup = 0 if self.tie_word_embeddings else self.vocab_size * self.hidden_size
        num_gdn = self.layer_types.count(GDN)
        state = self.linear_num_value_heads * self.linear_key_head_dim * self.linear_value_head_dim
        attention = 4 * self.num_attention_heads * self.head_dim * (self.num_hidden_layers - num_gdn)
        per_token = 2 * (self.num_parameters(active=True) - lookup) + 6 * state * num_gdn
        return float(per_token * num_tokens + attention * num_pairs)

    def to_hf(self) -> dict[str, Any]:
        """The configuration as Hugging Face's text models read it."""
        fields: dict[str, Any] = {
            name: getattr(self, name)
            for name in (
                "vocab_size",
                "hidden_size",
                "num_attention_heads",
                "num_key_value_heads",
                "head_dim",
                "linear_num_key_heads",
                "linear_num_value_heads",
                "linear_key_head_dim",
                "linear_value_head_dim",
                "linear_conv_kernel_dim",
                "rms_norm_eps",
                "initializer_range",
                "tie_word_embeddings",
                "max_position_embeddings",
            )
        }
        architectures = {
            "qwen3_5_text": "Qwen3_5ForCausalLM",
            "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
            "qwen3_next": "Qwen3NextForCausalLM",
        }
        rope = {
            "rope_type": "default",
            "rope_theta": self.rope_theta,
            "partial_rotary_factor": self.partial_rotary_factor,
        }
        fields |= {
            "architectures": [architectures[self.model_type]],
            "model_type": self.model_type,
            "num_hidden_layers": self.num_hidden_layers,
            "layer_types": list(self.layer_types),
            "hidden_act": "silu",
            "attention_bias": False,
            "rope_parameters": rope if self.is_next else {**rope, **_mrope(self)},
        }
        if self.intermediate_size is not None:
            fields["intermediate_size"] = self.intermediate_size
        if self.num_mtp_layers:
            fields["mtp_num_hidden_layers"] = self.num_mtp_layers
        if self.num_experts:
            for name in (
                "num_experts",
                "num_experts_per_tok",
                "moe_intermediate_size",
                "shared_expert_intermediate_size",
            ):
                fields[name] = getattr(self, name)
        if self.is_next:
            dense = [i for i in range(self.num_hidden_layers) if i not in self.moe_layers]
            fields |= {"norm_topk_prob": self.norm_topk_prob, "decoder_sparse_step": 1, "mlp_only_layers": dense}
        return fields


def _mrope(config: QwenConfig) -> dict[str, Any]:
    """The split of the rotary frequencies over time, height and width; for text all three are equal."""
    n = int(config.head_dim * config.partial_rotary_factor) // 2
    return {"mrope_interleaved": True, "mrope_section": [(n + 2) // 3, (n + 1) // 3, n // 3]}


def _from_hf(source: Mapping[str, Any]) -> QwenConfig:
    text = {**source, **source.get("text_config", {})}
    model_type = text.get("model_type")
    if model_type not in MODEL_TYPES:
        raise ValueError(message("QwenConfig.from_hf", "model_type", f"be one of {MODEL_TYPES}", repr(model_type)))
    if text.get("quantization_config"):
        method = text["quantization_config"].get("quant_method", "unnamed")
        rule = "be absent; load the unquantised checkpoint"
        raise ValueError(message("QwenConfig.from_hf", "quantization_config", rule, repr(method)))
    # Older files have the rotary settings beside the others.
    rope = text.get("rope_parameters") or {**(text.get("rope_scaling") or {}), **text}
    for name, got, want in (
        ("hidden_act", text.get("hidden_act", "silu"), "silu"),
        ("attention_bias", text.get("attention_bias", False), False),
        ("attn_output_gate", text.get("attn_output_gate", True), True),
        ("rope_type", rope.get("rope_type", rope.get("type", "default")), "default"),
    ):
        if got != want:
            raise ValueError(message("QwenConfig.from_hf", name, f"be {want!r}", repr(got)))
    # What transformers takes where a file is silent.
    names = {field.name for field in dataclasses.fields(QwenConfig)}
    fields: dict[str, Any] = {"vocab_size": 248320, "num_attention_heads": 16, "max_position_embeddings": 32768}
    fields |= {name: text[name] for name in names if name in text and text[name] is not None}
    fields["model_type"] = {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}.get(model_type, model_type)
    fields["rope_theta"] = float(rope.get("rope_theta", 10_000.0))
    fields["partial_rotary_factor"] = float(rope.get("partial_rotary_factor", 0.25))
    fields["num_mtp_layers"] = int(text.get("mtp_num_hidden_layers") or 0)
    # Either level may have it.
    fields["tie_word_embeddings"] = bool(
        source.get("text_config", {}).get("tie_word_embeddings", source.get("tie_word_embeddings", False))
    )
    missing = [name for name in ("hidden_size", "num_hidden_layers") if name not in text]
    if missing:
        raise ValueError(message("QwenConfig.from_hf", "source", "have hidden_size and num_hidden_layers", missing))
    count, interval = int(text["num_hidden_layers"]), int(text.get("full_attention_interval") or 4)
    kinds = text.get("layer_types") or [GDN if (i + 1) % interval else ATTENTION for i in range(count)]
    if len(kinds) != count or not set(kinds) <= {GDN, ATTENTION}:
        rule = f"have {count} entries, each {GDN!r} or {ATTENTION!r}"
        raise ValueError(message("QwenConfig.from_hf", "layer_types", rule, kinds))
    fields["layer_types"] = tuple(kinds)
    if model_type != "qwen3_next":
        fields["norm_topk_prob"] = True
    fields["moe_layers"] = _moe_layers(model_type, text, count)
    if not fields["moe_layers"]:
        for name in ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size"):
            fields[name] = 0
    return QwenConfig(**fields)


def _moe_layers(model_type: str, text: Mapping[str, Any], count: int) -> tuple[int, ...]:
    if model_type.startswith("qwen3_5_moe"):
        return tuple(range(count))
    if model_type != "qwen3_next" or not text.get("num_experts"):
        return ()
    step, dense = int(text.get("decoder_sparse_step") or 1), text.get("mlp_only_layers") or []
    return tuple(i for i in range(count) if i not in dense and (i + 1) % step == 0)


def _dense(layers: int, hidden: int, mlp: int, heads: int, kv_heads: int, value_heads: int, tied: bool) -> QwenConfig:
    return QwenConfig(
        model_type="qwen3_5_text",
        vocab_size=248320,
        hidden_size=hidden,
        intermediate_size=mlp,
        layer_types=(GDN, GDN, GDN, ATTENTION) * (layers // 4),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        linear_num_value_heads=value_heads,
        tie_word_embeddings=tied,
    )


def _sparse(
    layers: int, hidden: int, mlp: int, heads: int, value_heads: int, experts: int, top: int, **changes: Any
) -> QwenConfig:
    config = QwenConfig(
        model_type="qwen3_5_moe_text",
        vocab_size=248320,
        hidden_size=hidden,
        layer_types=(GDN, GDN, GDN, ATTENTION) * (layers // 4),
        num_attention_heads=heads,
        num_key_value_heads=2,
        linear_num_value_heads=value_heads,
        moe_layers=tuple(range(layers)),
        num_experts=experts,
        num_experts_per_tok=top,
        moe_intermediate_size=mlp,
        shared_expert_intermediate_size=mlp,
    )
    return dataclasses.replace(config, **changes)


_PRESETS = {
    "qwen3.5-0.8b": _dense(24, 1024, 3584, 8, 2, 16, tied=True),
    "qwen3.5-2b": _dense(24, 2048, 6144, 8, 2, 16, tied=True),
    "qwen3.5-4b": _dense(32, 2560, 9216, 16, 4, 32, tied=True),
    "qwen3.5-9b": _dense(32, 4096, 12288, 16, 4, 32, tied=False),
    "qwen3.5-27b": _dense(64, 5120, 17408, 24, 4, 48, tied=False),
    "qwen3.5-35b-a3b": _sparse(40, 2048, 512, 16, 32, 256, 8),
    "qwen3.5-122b-a10b": _sparse(48, 3072, 1024, 32, 64, 256, 8),
    "qwen3.5-397b-a17b": _sparse(60, 4096, 1024, 32, 64, 512, 10),
    "qwen3-next-80b-a3b": _sparse(
        48, 2048, 512, 16, 32, 512, 10, model_type="qwen3_next", vocab_size=151936, intermediate_size=5632
    ),
}
_ALIASES = {
    "qwen3.6-27b": "qwen3.5-27b",
    "qwen3.8-27b": "qwen3.5-27b",
    "qwen3.6-35b-a3b": "qwen3.5-35b-a3b",
}
