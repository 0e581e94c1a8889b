"""What the paths share."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

L2NORM_EPS = 1e-6


def l2norm(x: Float[Array, "*rows K"]) -> Float[Array, "*rows K"]:
    """Scales the vectors of the last axis by `1 / sqrt(|x|^2 + 1e-6)`, computed in float32, in the dtype of `x`."""
    y = x.astype(jnp.float32)
    return (y * lax.rsqrt(jnp.sum(y * y, axis=-1, keepdims=True) + L2NORM_EPS)).astype(x.dtype)


def tokens_and_resets(segment_ids: Int[Array, "B T"]) -> tuple[Bool[Array, "B T"], Bool[Array, "B T"]]:
    """Which are tokens and no padding; and which of these start anew, in another segment than the last token before."""
    is_token = segment_ids != 0
    # Index of the last token before each, or -1.
    last = lax.cummax(jnp.where(is_token, lax.broadcasted_iota(jnp.int32, segment_ids.shape, 1), -1), axis=1)
    last = jnp.pad(last, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
    last_id = jnp.take_along_axis(segment_ids, jnp.maximum(last, 0), axis=1)
    return is_token, is_token & (last >= 0) & (segment_ids != last_id)


def varying(*arrays: jax.Array) -> tuple[str, ...]:
    """The mesh axes of an enclosing `shard_map` over which any of the arrays differs between devices."""
    return tuple(sorted({axis for x in arrays for axis in jax.typeof(x).manual_axis_type.varying}))


def vary_like(x: jax.Array, *others: jax.Array) -> jax.Array:
    """`x`, typed as differing between devices wherever any of the others does, as a loop over them needs it."""
    known = varying(x)
    missing = tuple(axis for axis in varying(*others) if axis not in known)
    return lax.pcast(x, missing, to="varying") if missing else x
