"""Qwen hybrid models: Gated DeltaNet layers with a full-attention layer after every few of them."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxqla._checks import message
from jaxqla.flax import (
    GatedAttention,
    GatedDeltaNet,
    GDNState,
    HybridCache,
    KVState,
    Places,
    RMSNorm,
    SparseMoE,
    SwiGLU,
)
from jaxqla.flax.attention import Implementation
from jaxqla.flax.sharding import axes, constrain
from jaxqla.models.config import ATTENTION, GDN, QwenConfig

State = GDNState | KVState


class DecoderLayer(nnx.Module):
    """`h = x + mixer(norm(x))`, then `h + mlp(norm(h))`.

    The mixer is `linear_attn`, a `GatedDeltaNet`, or `self_attn`, a `GatedAttention`; `mlp` is a `SwiGLU` or a
    `SparseMoE`.

    Args:
        config: Of the model.
        kind: `"linear_attention"` or `"full_attention"`.
        sparse: Whether the MLP is a mixture of experts.
        dtype: Of the computation.
        param_dtype: Of the parameters.
        implementation: Of `gated_delta`.
        attention_implementation: Of the attention.
        rngs: Takes `params`.
    """

    def __init__(
        self,
        config: QwenConfig,
        kind: str,
        sparse: bool,
        *,
        dtype: DTypeLike | None,
        param_dtype: DTypeLike,
        implementation: str | None,
        attention_implementation: Implementation,
        rngs: nnx.Rngs,
    ):
        common: dict[str, Any] = {
            "kernel_init": nnx.initializers.normal(config.initializer_range),
            "dtype": dtype,
            "param_dtype": param_dtype,
            "rngs": rngs,
        }
        self.kind = kind
        self.input_layernorm = _norm(config, param_dtype)
        if kind == GDN:
            self.linear_attn = GatedDeltaNet(
                config.hidden_size,
                config.linear_num_key_heads,
                config.linear_num_value_heads,
                key_head_dim=config.linear_key_head_dim,
                value_head_dim=config.linear_value_head_dim,
                conv_kernel_size=config.linear_conv_kernel_dim,
                norm_eps=config.rms_norm_eps,
                implementation=implementation,
                **common,
            )
        else:
            self.self_attn = GatedAttention(
                config.hidden_size,
                config.num_attention_heads,
                config.num_key_value_heads,
                head_dim=config.head_dim,
                rotary_dim=int(config.head_dim * config.partial_rotary_factor),
                rope_theta=config.rope_theta,
                norm_eps=config.rms_norm_eps,
                implementation=attention_implementation,
                **common,
            )
        self.post_attention_layernorm = _norm(config, param_dtype)
        if sparse:
            self.mlp = SparseMoE(
                config.hidden_size,
                config.num_experts,
                config.num_experts_per_tok,
                config.moe_intermediate_size,
                config.shared_expert_intermediate_size,
                norm_topk_prob=config.norm_topk_prob,
                **common,
            )
        else:
            if config.intermediate_size is None:
                raise ValueError(message("DecoderLayer", "intermediate_size", "be given for a dense layer", "None"))
            self.mlp = SwiGLU(config.hidden_size, config.intermediate_size, **common)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        places: Places,
        segment_ids: Int[Array, "B T"] | None,
        state: State | None = None,
    ) -> tuple[Float[Array, "B T D"], State | None]:
        """Runs the layer; the state after it is None where none went in."""
        mix = self._mixer(places)
        h = self.input_layernorm(x)
        if state is None:
            y = mix(h, segment_ids=segment_ids)
        else:
            y, state = mix(h, segment_ids=segment_ids, state=state, return_state=True)
        x = constrain(x + y, "batch", None, None)
        return constrain(x + self.mlp(self.post_attention_layernorm(x)), "batch", None, None), state

    def _mixer(self, places: Places) -> Callable[..., Any]:
        return self.linear_attn if self.kind == GDN else functools.partial(self.self_attn, places=places)

    def init_state(self, batch: int, max_length: int, dtype: DTypeLike | None) -> State:
        """The state before the first token."""
        if self.kind == GDN:
            return self.linear_attn.init_state(batch, dtype=dtype)
        return self.self_attn.init_state(batch, max_length, dtype=dtype)


class Block(nnx.Module):
    """Layers one after the other: what a scan over layers takes at a time."""

    def __init__(self, layers: list[DecoderLayer]):
        self.layers = nnx.List(layers)

    def __call__(
        self, x: Array, places: Places, segment_ids: Array | None, states: tuple[State, ...] | None = None
    ) -> tuple[Array, tuple[State, ...] | None]:
        """Runs the layers; the states after them are None where none went in."""
        new = []
        for i, layer in enumerate(self.layers):
            x, state = layer(x, places, segment_ids, None if states is None else states[i])
            new.append(state)
        return x, None if states is None else tuple(new)


class MultiTokenPredictor(nnx.Module):
    """The head that predicts the token after the next one, from the hidden states and the next tokens.

    `norm(layers(fc([norm(embed(next)), norm(hidden)])))`; its layers are of full attention, embedding and output
    projection are those of the model.

    Args:
        config: Of the model; `num_mtp_layers` layers.
        rngs: Takes `params`.
        **options: Of `DecoderLayer`.
    """

    def __init__(self, config: QwenConfig, *, rngs: nnx.Rngs, **options: Any):
        D, param_dtype = config.hidden_size, options["param_dtype"]
        self.pre_fc_norm_embedding = _norm(config, param_dtype)
        self.pre_fc_norm_hidden = _norm(config, param_dtype)
        self.fc = nnx.Linear(
            2 * D,
            D,
            use_bias=False,
            dtype=options["dtype"],
            param_dtype=param_dtype,
            kernel_init=nnx.initializers.normal(config.initializer_range),
            kernel_metadata=axes("embed", None),
            rngs=rngs,
        )
        sparse = bool(config.moe_layers)
        self.layers = nnx.List(
            [DecoderLayer(config, ATTENTION, sparse, rngs=rngs, **options) for _ in range(config.num_mtp_layers)]
        )
        self.norm = _norm(config, param_dtype)

    def __call__(
        self, embedded: Array, hidden: Array, places: Places, segment_ids: Array | None
    ) -> Float[Array, "B T D"]:
        """What `QwenForCausalLM.logits` takes, from the embedded next tokens and the hidden states."""
        x = self.fc(jnp.concatenate([self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)], axis=-1))
        for layer in self.layers:
            x, _ = layer(x, places, segment_ids)
        return self.norm(x)


class QwenForCausalLM(nnx.Module):
    """A Qwen hybrid language model.

        logits = model(tokens)                                  # training, or scoring
        logits = model(tokens, segment_ids=segment_ids)         # packed or padded rows
        cache = model.init_cache(batch, max_length)
        logits, cache = model(tokens, cache=cache)              # prefill, in any pieces, and decode

    On several devices, create and run it inside `jaxqla.flax.use_mesh`.

    Args:
        config: Sizes.
        dtype: Of the computation; None takes that of the parameters.
        param_dtype: Of the parameters; `A_log`, `dt_bias` and the gated norms are float32 always.
        scan_layers: Whether layers of the same kind are stacked and the layers compiled once a block
            (`config.block_length`, four layers), which compiles faster and runs the same.
        remat: Whether the backward computes a layer (a block, with `scan_layers`) again instead of keeping what is
            inside.
        remat_policy: A policy of `jax.checkpoint` for it, such as `jaxqla.save_residuals`.
        implementation: Of `jaxqla.gated_delta`.
        attention_implementation: Of `GatedAttention`.
        rngs: Takes `params`.
    """

    def __init__(
        self,
        config: QwenConfig,
        *,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        scan_layers: bool = False,
        remat: bool = False,
        remat_policy: Callable[..., Any] | None = None,
        implementation: str | None = None,
        attention_implementation: Implementation = "xla",
        rngs: nnx.Rngs,
    ):
        self.config, self.dtype = config, dtype
        self.scan_layers, self.remat, self.remat_policy = scan_layers, remat, remat_policy
        options: dict[str, Any] = {
            "dtype": dtype,
            "param_dtype": param_dtype,
            "implementation": implementation,
            "attention_implementation": attention_implementation,
        }
        init = nnx.initializers.normal(config.initializer_range)
        self.embed_tokens = nnx.Embed(
            config.vocab_size,
            config.hidden_size,
            dtype=dtype,
            param_dtype=param_dtype,
            embedding_init=init,
            embedding_metadata=axes("vocab", "embed"),
            rngs=rngs,
        )

        def layer(i: int, rngs: nnx.Rngs) -> DecoderLayer:
            return DecoderLayer(config, config.layer_types[i], i in config.moe_layers, rngs=rngs, **options)

        if scan_layers:
            length = config.block_length

            @nnx.vmap(in_axes=0, out_axes=0, transform_metadata={nnx.PARTITION_NAME: "layers"})
            def stacked(rngs: nnx.Rngs) -> Block:
                return Block([layer(i, rngs) for i in range(length)])

            self.blocks = stacked(rngs.split(config.num_hidden_layers // length))
        else:
            self.layers = nnx.List([layer(i, rngs) for i in range(config.num_hidden_layers)])
        self.norm = _norm(config, param_dtype)
        if not config.tie_word_embeddings:
            self.lm_head = nnx.Linear(
                config.hidden_size,
                config.vocab_size,
                use_bias=False,
                dtype=dtype,
                param_dtype=param_dtype,
                kernel_init=init,
                kernel_metadata=axes("embed", "vocab"),
                rngs=rngs,
            )
        if config.num_mtp_layers:
            self.mtp = MultiTokenPredictor(config, rngs=rngs, **options)

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        *,
        segment_ids: Int[Array, "B T"] | None = None,
        positions: Int[Array, "B T"] | None = None,
        cache: HybridCache | None = None,
        logits_to_keep: int | None = None,
    ) -> Float[Array, "B T vocab"] | tuple[Float[Array, "B T vocab"], HybridCache]:
        """Computes the logits of the token after each.

        Args:
            tokens: Ids, int32.
            segment_ids: Int32; 0 is padding, on any side, and a change of id starts another document. A mask of zeros
                and ones is a legal value. With a cache, the first document of a call goes on with the last one of the
                call before.
            positions: For the rotary embeddings; the default counts the tokens of each document from 0, or on from the
                cache.
            cache: What earlier calls left. Rows must not grow beyond the length it was made for: keys past it are lost.
            logits_to_keep: Only for so many of the last places of each row, or all where there are fewer. The default
                is all.

        Returns:
            Logits, float32, of no meaning at padding; with a cache, `(logits, cache)`.

        Raises:
            ValueError: `segment_ids` or `positions` have another shape than `tokens`, or `logits_to_keep` is negative.
        """
        if logits_to_keep is not None and logits_to_keep < 0:
            raise ValueError(message("QwenForCausalLM", "logits_to_keep", "be at least 0", logits_to_keep))
        hidden, cache = self.hidden_states(tokens, segment_ids=segment_ids, positions=positions, cache=cache)
        if logits_to_keep is not None:
            hidden = hidden[:, max(0, hidden.shape[1] - logits_to_keep) :]
        logits = self.logits(hidden)
        return logits if cache is None else (logits, cache)

    def hidden_states(
        self,
        tokens: Int[Array, "B T"],
        *,
        segment_ids: Int[Array, "B T"] | None = None,
        positions: Int[Array, "B T"] | None = None,
        cache: HybridCache | None = None,
    ) -> tuple[Float[Array, "B T D"], HybridCache | None]:
        """What `logits` takes: the normalised output of the last layer; and the cache after it, if one was given."""
        places = Places.of(tokens.shape, segment_ids, positions, cache)
        x = self._embed(tokens)
        states = None if cache is None else cache.layers

        def run(module: Any, x: Array, states: Any) -> tuple[Array, Any]:
            return module(x, places, segment_ids, states)

        if self.remat:
            run = jax.checkpoint(run, policy=self.remat_policy)
        if self.scan_layers:

            def body(x: Array, block: tuple[Any, Any]) -> tuple[Array, Any]:
                return run(block[0], x, block[1])

            x, new = lax.scan(body, x, (self.blocks, states))
        else:
            new = []
            for i, layer in enumerate(self.layers):
                x, state = run(layer, x, None if states is None else states[i])
                new.append(state)
        hidden = self.norm(x)
        return hidden, None if cache is None else places.advance(cache, tuple(new))

    def _embed(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        table = self.embed_tokens.embedding[...]
        # Where the width of the table stays split, every device looks up the tokens of all.
        table = constrain(table.astype(self.dtype or table.dtype), "vocab", None)
        return constrain(jnp.take(table, tokens, axis=0), "batch", None, None)

    def logits(self, hidden: Float[Array, "*rows D"]) -> Float[Array, "*rows vocab"]:
        """Logits of hidden states, summed and returned in float32."""
        if self.config.tie_word_embeddings:
            weight = self.embed_tokens.embedding[...].T
        else:
            weight = self.lm_head.kernel[...]
        return jnp.dot(hidden, weight.astype(hidden.dtype), preferred_element_type=jnp.float32)

    def mtp_logits(
        self,
        hidden: Float[Array, "B T D"],
        next_tokens: Int[Array, "B T"],
        *,
        segment_ids: Int[Array, "B T"] | None = None,
        positions: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B T vocab"]:
        """Logits of the token after `next_tokens`.

        Args:
            hidden: From `hidden_states`.
            next_tokens: The token after each.
            segment_ids: As in `__call__`.
            positions: As in `__call__`.

        Raises:
            ValueError: The model has no such head.
        """
        if not self.config.num_mtp_layers:
            raise ValueError(message("mtp_logits", "config.num_mtp_layers", "be at least 1", 0))
        places = Places.of(next_tokens.shape, segment_ids, positions)
        return self.logits(self.mtp(self._embed(next_tokens), hidden, places, segment_ids))

    def init_cache(self, batch: int, max_length: int, *, dtype: DTypeLike | None = None) -> HybridCache:
        """An empty cache.

        Args:
            batch: Rows.
            max_length: Most tokens of a row, prompt and continuation together, padding not counted.
            dtype: Of keys, values and convolution states; None takes that of the computation or of the parameters.
                Recurrent states are float32.
        """
        layers = self.blocks.layers if self.scan_layers else self.layers
        states = tuple(layer.init_state(batch, max_length, dtype) for layer in layers)
        if self.scan_layers:
            count = self.config.num_hidden_layers // self.config.block_length
            states = jax.tree.map(lambda x: jnp.broadcast_to(x, (count, *x.shape)), states)
        zeros = jnp.zeros(batch, jnp.int32)
        return HybridCache(states, zeros, zeros)

    @classmethod
    def from_pretrained(cls, path: str | Path, **options: Any) -> "QwenForCausalLM":
        """Loads a folder of safetensors; see `jaxqla.models.load`, which also tells what was mapped and skipped."""
        from jaxqla.models.hugging_face import load

        return load(path, **options)[0]

    def save_pretrained(self, path: str | Path) -> None:
        """Writes `config.json` and `model.safetensors` as Hugging Face's text model reads them."""
        from jaxqla.models.hugging_face import save

        save(self, path)


def _norm(config: QwenConfig, param_dtype: DTypeLike) -> RMSNorm:
    return RMSNorm(config.hidden_size, eps=config.rms_norm_eps, param_dtype=param_dtype)
