"""Position-wise layers: SwiGLU, and a mixture of experts of them."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxqla._checks import message
from jaxqla.flax.sharding import axes, in_use, partition


class SwiGLU(nnx.Module):
    """Computes `(silu(x W_gate) * (x W_up)) W_down`, without biases.

    Parameters: `gate_proj.kernel`, `up_proj.kernel [D, F]`, `down_proj.kernel [F, D]`.

    Args:
        hidden_size: Width `D` of the input and the output.
        intermediate_size: Width `F` in between.
        kernel_init: Of the projections.
        dtype: Of the computation; None takes that of input and parameters together.
        param_dtype: Of the parameters.
        rngs: Takes `params`.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        kernel_init: nnx.Initializer = nnx.initializers.normal(0.02),  # noqa: B008
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        linear = functools.partial(
            nnx.Linear, use_bias=False, dtype=dtype, param_dtype=param_dtype, kernel_init=kernel_init, rngs=rngs
        )
        self.gate_proj = linear(hidden_size, intermediate_size, kernel_metadata=axes("embed", "mlp"))
        self.up_proj = linear(hidden_size, intermediate_size, kernel_metadata=axes("embed", "mlp"))
        self.down_proj = linear(intermediate_size, hidden_size, kernel_metadata=axes("mlp", "embed"))

    def __call__(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
        """Applies the layer to each token."""
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


class SparseMoE(nnx.Module):
    """Sends each token to `num_experts_per_tok` of `num_experts` SwiGLUs, and to one that all tokens share.

        p   = softmax(x W_router), float32, over all experts
        y   = sum over the top experts e of p_e SwiGLU_e(x) + sigmoid(x w_shared) SwiGLU_shared(x)

    No token is dropped: tokens are sorted by expert, and each expert multiplies its own (`jax.lax.ragged_dot`). On a
    mesh each device sorts the tokens of its rows; experts are split by their width, not by their number. jax has no
    `vmap` of `ragged_dot` over tokens alone yet: give more rows in its place.

    Parameters: `router.kernel [D, E]`; `gate_proj`, `up_proj [E, D, F]`, `down_proj [E, F, D]`;
    `shared_expert`, a `SwiGLU`; `shared_expert_gate.kernel [D, 1]`.

    Args:
        hidden_size: Width `D` of the input and the output.
        num_experts: Experts `E`.
        num_experts_per_tok: How many of them a token goes to, at most `E`.
        intermediate_size: Width `F` of an expert.
        shared_intermediate_size: Width of the shared expert.
        norm_topk_prob: Whether the weights of a token's experts are scaled to sum to one.
        kernel_init: Of the projections.
        dtype: Of the computation; None takes that of input and parameters together.
        param_dtype: Of the parameters.
        rngs: Takes `params`.

    Raises:
        ValueError: `num_experts_per_tok` is out of its range.
    """

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        num_experts_per_tok: int,
        intermediate_size: int,
        shared_intermediate_size: int,
        *,
        norm_topk_prob: bool = True,
        kernel_init: nnx.Initializer = nnx.initializers.normal(0.02),  # noqa: B008
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        if not 1 <= num_experts_per_tok <= num_experts:
            rule = f"be from 1 to num_experts = {num_experts}"
            raise ValueError(message("SparseMoE", "num_experts_per_tok", rule, num_experts_per_tok))
        self.top, self.norm_topk_prob, self.dtype = num_experts_per_tok, norm_topk_prob, dtype
        linear = functools.partial(
            nnx.Linear, use_bias=False, dtype=dtype, param_dtype=param_dtype, kernel_init=kernel_init, rngs=rngs
        )

        def experts(rows: int, columns: int, *names: str) -> nnx.Param:
            values = kernel_init(rngs.params(), (num_experts, rows, columns), param_dtype)
            return nnx.Param(values, **axes("experts", *names))

        self.router = linear(hidden_size, num_experts, kernel_metadata=axes(None, None))
        self.gate_proj = experts(hidden_size, intermediate_size, "embed", "mlp")
        self.up_proj = experts(hidden_size, intermediate_size, "embed", "mlp")
        self.down_proj = experts(intermediate_size, hidden_size, "mlp", "embed")
        self.shared_expert = SwiGLU(
            hidden_size,
            shared_intermediate_size,
            kernel_init=kernel_init,
            dtype=dtype,
            param_dtype=param_dtype,
            rngs=rngs,
        )
        self.shared_expert_gate = linear(hidden_size, 1, kernel_metadata=axes(None, None))

    def __call__(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
        """Applies the layer to each token."""
        shared = jax.nn.sigmoid(self.shared_expert_gate(x)) * self.shared_expert(x)
        scores = self.router(x)
        gate, up, down = (y[...].astype(shared.dtype) for y in (self.gate_proj, self.up_proj, self.down_proj))
        run = functools.partial(_experts, top=self.top, norm_topk_prob=self.norm_topk_prob, dtype=shared.dtype)
        if in_use():
            # Each device sorts tokens of its own; the compiler would let each sort, and compute, those of all.
            names = ("batch", *[None] * (x.ndim - 1)) if x.ndim > 1 else (None,)
            rows, widths = partition(x.shape, *names), partition(up.shape, None, None, "mlp")
            y = jax.shard_map(
                lambda *arrays: lax.psum(run(*arrays), widths[2] or ()),
                in_specs=(rows, rows, widths, widths, P(None, widths[2], None)),
                out_specs=rows,
            )(x, scores, gate, up, down)
        else:
            y = run(x, scores, gate, up, down)
        return y + shared


def _experts(
    x: Float[Array, "*rows D"],
    scores: Float[Array, "*rows E"],
    gate: Float[Array, "E D F"],
    up: Float[Array, "E D F"],
    down: Float[Array, "E F D"],
    *,
    top: int,
    norm_topk_prob: bool,
    dtype: DTypeLike,
) -> Float[Array, "*rows D"]:
    """The weighted sum of each token's experts."""
    tokens = jnp.asarray(x).reshape(-1, x.shape[-1])
    # In float32, so that ties between experts are as rare as the router means them to be.
    probabilities = jax.nn.softmax(scores.reshape(-1, scores.shape[-1]).astype(jnp.float32), axis=-1)
    weights, chosen = lax.top_k(probabilities, top)
    if norm_topk_prob:
        weights /= jnp.sum(weights, axis=-1, keepdims=True)
    order = jnp.argsort(chosen.reshape(-1), stable=True)
    sizes = jnp.bincount(chosen.reshape(-1), length=scores.shape[-1]).astype(jnp.int32)
    sorted_tokens = tokens[order // top].astype(dtype)
    hidden = jax.nn.silu(lax.ragged_dot(sorted_tokens, gate, sizes)) * lax.ragged_dot(sorted_tokens, up, sizes)
    out = lax.ragged_dot(hidden, down, sizes)
    out = jnp.zeros_like(out).at[order].set(out, unique_indices=True).reshape(*chosen.shape, -1)
    return jnp.einsum("nk,nkd->nd", weights.astype(dtype), out).reshape(x.shape)
