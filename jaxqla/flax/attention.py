"""Softmax attention with a gated output, grouped heads and partial rotary embeddings, as in Qwen3-Next and Qwen3.5."""

import functools
from collections.abc import Callable
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from jaxqla._checks import message
from jaxqla.flax.cache import KVState, Places
from jaxqla.flax.norms import RMSNorm
from jaxqla.flax.sharding import axes, constrain

# Queries taken at a time where there are more: the scores of a block against all keys are what is in memory at once.
_QUERY_BLOCK = 512
Implementation = Literal["xla", "cudnn"]


class GatedAttention(nnx.Module):
    """Mixes the tokens of each row by causal softmax attention within their document.

        q, gate = split(x W_q) per head;  k, v = x W_k, x W_v
        q, k    = rotary(rmsnorm(q)), rotary(rmsnorm(k))
        y       = (softmax(q k^T / sqrt(head_dim)) v * sigmoid(gate)) W_o

    Parameters: `q_proj.kernel [D, N, 2 head_dim]`, per head query and gate; `k_proj.kernel`, `v_proj.kernel
    [D, G, head_dim]`; `q_norm.scale`, `k_norm.scale [head_dim]`; `o_proj.kernel [N, head_dim, D]`.

    Args:
        hidden_size: Width `D` of the input and the output.
        num_heads: Heads `N` of the queries.
        num_kv_heads: Heads `G` of keys and values; `N` is a multiple of it.
        head_dim: Width of a head.
        rotary_dim: How many of a head's leading numbers are rotated, an even number.
        rope_theta: Base of the rotary frequencies.
        norm_eps: Of the norms of queries and keys.
        kernel_init: Of the projections.
        dtype: Of the computation; None takes that of input and parameters together.
        param_dtype: Of the parameters.
        implementation: Of `jax.nn.dot_product_attention`. `"xla"`, the default, takes long rows block by block, so
            that memory stays linear. `"cudnn"` needs an NVIDIA GPU and bfloat16 or float16.
        rngs: Takes `params`.

    Raises:
        ValueError: The heads do not divide, `rotary_dim` is odd or wider than a head, or `implementation` is unknown.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        *,
        head_dim: int = 256,
        rotary_dim: int = 64,
        rope_theta: float = 1e7,
        norm_eps: float = 1e-6,
        kernel_init: nnx.Initializer = nnx.initializers.normal(0.02),  # noqa: B008
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        implementation: Implementation = "xla",
        rngs: nnx.Rngs,
    ):
        if num_heads % num_kv_heads:
            rule = f"be a multiple of num_kv_heads = {num_kv_heads}"
            raise ValueError(message("GatedAttention", "num_heads", rule, num_heads))
        if rotary_dim % 2 or rotary_dim > head_dim:
            rule = f"be even and at most head_dim = {head_dim}"
            raise ValueError(message("GatedAttention", "rotary_dim", rule, rotary_dim))
        if implementation not in get_args(Implementation):
            rule = f"be one of {get_args(Implementation)}"
            raise ValueError(message("GatedAttention", "implementation", rule, repr(implementation)))
        self.head_dim, self.num_kv_heads = head_dim, num_kv_heads
        self.rotary_dim, self.rope_theta = rotary_dim, rope_theta
        self.dtype = dtype
        self.implementation: Implementation = implementation

        linear = functools.partial(
            nnx.LinearGeneral, use_bias=False, dtype=dtype, param_dtype=param_dtype, kernel_init=kernel_init, rngs=rngs
        )
        heads, kv_heads = axes("embed", "heads", None), axes("embed", "kv_heads", None)
        self.q_proj = linear(hidden_size, (num_heads, 2 * head_dim), kernel_metadata=heads)
        self.k_proj = linear(hidden_size, (num_kv_heads, head_dim), kernel_metadata=kv_heads)
        self.v_proj = linear(hidden_size, (num_kv_heads, head_dim), kernel_metadata=kv_heads)
        self.q_norm = RMSNorm(head_dim, eps=norm_eps, param_dtype=param_dtype)
        self.k_norm = RMSNorm(head_dim, eps=norm_eps, param_dtype=param_dtype)
        self.o_proj = linear(
            (num_heads, head_dim), hidden_size, axis=(-2, -1), kernel_metadata=axes("heads", None, "embed")
        )

    def __call__(
        self,
        x: Float[Array, "B T D"],
        *,
        segment_ids: Int[Array, "B T"] | None = None,
        places: Places | None = None,
        state: KVState | None = None,
        return_state: bool = False,
    ) -> Float[Array, "B T D"] | tuple[Float[Array, "B T D"], KVState | None]:
        """Runs the layer.

        Args:
            x: Rows of tokens.
            segment_ids: Int32; 0 is padding, on any side: no token sees it, and its output is exactly 0. A token sees
                those before it in its document, which ends where the id changes.
            places: Where the tokens are in their rows. The default follows from `segment_ids`; with a state it is
                needed, since the layer does not know how many tokens came before.
            state: Keys and values of the tokens before these, with room for these.
            return_state: Whether to return the state after these tokens as well.

        Returns:
            `y`, in the computation's dtype; with `return_state`, `(y, state)`, the state None where none was given.

        Raises:
            ValueError: A state is given without `places`.
        """
        if places is None:
            if state is not None:
                raise ValueError(message("GatedAttention", "places", "be given where state is", "None"))
            places = Places.of(x.shape[:2], segment_ids)
        if places.is_token is not None:
            x = jnp.where(places.is_token[..., None], x, 0)
        q, gate = jnp.split(self.q_proj(x), 2, axis=-1)
        rotate = functools.partial(_rotate, positions=places.positions, dim=self.rotary_dim, theta=self.rope_theta)
        q, k, v = rotate(self.q_norm(q)), rotate(self.k_norm(self.k_proj(x))), self.v_proj(x)
        if state is not None:
            state = _write(state, k, v, places.slots)
            k, v = state.keys.astype(q.dtype), state.values.astype(q.dtype)
            # The slot of a key is its place in the buffer.
            key_slots = jnp.broadcast_to(jnp.arange(k.shape[1], dtype=jnp.int32), k.shape[:2])
        else:
            key_slots = places.slots
        if self.implementation == "cudnn" and state is None and segment_ids is None:
            # Known to be one document a row: half of the scores need not be made, and no mask.
            o = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
        else:
            o = _attend(q, k, v, places, key_slots, self.implementation)
        y = o * jax.nn.sigmoid(gate.astype(jnp.float32)).astype(o.dtype)
        if places.is_token is not None:
            y = jnp.where(places.is_token[..., None, None], y, 0)
        y = self.o_proj(y)
        return (y, state) if return_state else y

    def init_state(self, batch: int, max_length: int, *, dtype: DTypeLike | None = None) -> KVState:
        """An empty state.

        Args:
            batch: Rows.
            max_length: Tokens of a row that it has room for.
            dtype: Of keys and values; None takes that of the computation, or of the parameters.
        """
        shape = (batch, max_length, self.num_kv_heads, self.head_dim)
        empty = jnp.zeros(shape, dtype or self.dtype or self.k_proj.kernel.dtype)
        empty = constrain(empty, "batch", None, "kv_heads", None)
        return KVState(empty, empty)


def _write(state: KVState, k: Array, v: Array, slots: Int[Array, "B T"]) -> KVState:
    """Puts keys and values into their slots; what has none, padding, is dropped."""
    rows = jnp.arange(k.shape[0])[:, None]

    def put(buffer, x):
        return buffer.at[rows, slots].set(x.astype(buffer.dtype), mode="drop")

    return KVState(put(state.keys, k), put(state.values, v))


def _rotate(x: Float[Array, "B T N D"], positions: Int[Array, "B T"], dim: int, theta: float) -> Array:
    """Rotary embedding of the first `dim` numbers of each head, halves paired; angles in float32."""
    frequencies = theta ** (-jnp.arange(0, dim, 2, dtype=jnp.float32) / dim)
    angles = positions[..., None].astype(jnp.float32) * frequencies
    cos, sin = (f(angles)[:, :, None].astype(x.dtype) for f in (jnp.cos, jnp.sin))
    a, b, rest = jnp.split(x, [dim // 2, dim], axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)


def _attend(
    q: Float[Array, "B T N D"],
    k: Float[Array, "B S G D"],
    v: Float[Array, "B S G D"],
    places: Places,
    key_slots: Int[Array, "B S"],
    implementation: Implementation,
) -> Float[Array, "B T N D"]:
    """Attention of each token to the slots from the start of its document to its own."""
    T = q.shape[1]

    def block(q: Array, slots: Array, starts: Array) -> Array:
        keys = key_slots[:, None, None]
        mask: Bool[Array, "B 1 T S"] = (starts[:, None, :, None] <= keys) & (keys <= slots[:, None, :, None])
        return jax.nn.dot_product_attention(q, k, v, mask=mask, implementation=implementation)

    if implementation == "cudnn" or T <= _QUERY_BLOCK:
        return block(q, places.slots, places.starts)
    return _in_blocks(block, _QUERY_BLOCK, q, places.slots, places.starts)


def _in_blocks(function: Callable[..., Array], size: int, *arrays: Array) -> Array:
    """`function` on pieces of the second axis of the arrays, one by one; nothing inside is kept for gradients."""
    B, T = arrays[0].shape[:2]
    count = -(-T // size)

    def pieces(x: Array) -> Array:
        x = jnp.pad(x, ((0, 0), (0, count * size - T), *[(0, 0)] * (x.ndim - 2)))
        return x.reshape(B, count, size, *x.shape[2:]).swapaxes(0, 1)

    out = lax.map(lambda xs: jax.checkpoint(function)(*xs), tuple(pieces(x) for x in arrays))
    return out.swapaxes(0, 1).reshape(B, count * size, *out.shape[3:])[:, :T]
