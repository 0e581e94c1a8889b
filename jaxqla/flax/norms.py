"""Root-mean-square norms, in float32 whatever the dtype of their input."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxqla.flax.sharding import axes


class RMSNorm(nnx.Module):
    """Computes `x / sqrt(mean(x^2) + eps) * (1 + scale)` over the last axis; the result has the dtype of `x`.

    Args:
        features: Size of the last axis.
        eps: Added to the mean of squares.
        axis: Logical name of the axis of `scale`.
        param_dtype: Of `scale`, which is 0 at first.
    """

    def __init__(
        self, features: int, *, eps: float = 1e-6, axis: str | None = None, param_dtype: DTypeLike = jnp.float32
    ):
        self.eps = eps
        self.scale = nnx.Param(jnp.zeros(features, param_dtype), **axes(axis))

    def __call__(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
        """Normalises the last axis."""
        return (_normalise(x, self.eps) * (1 + self.scale[...].astype(jnp.float32))).astype(x.dtype)


class GatedRMSNorm(nnx.Module):
    """Computes `x / sqrt(mean(x^2) + eps) * scale * silu(gate)` over the last axis; the result has the dtype of `x`.

    The norm comes before the gate. `scale` is 1 at first, and float32 always.

    Args:
        features: Size of the last axis.
        eps: Added to the mean of squares.
    """

    def __init__(self, features: int, *, eps: float = 1e-6):
        self.eps = eps
        self.scale = nnx.Param(jnp.ones(features, jnp.float32), **axes(None))

    def __call__(self, x: Float[Array, "*rows V"], gate: Float[Array, "*rows V"]) -> Float[Array, "*rows V"]:
        """Normalises the last axis of `x`, then multiplies by the gate."""
        y = _normalise(x, self.eps) * self.scale[...].astype(jnp.float32)
        return (y * jax.nn.silu(gate.astype(jnp.float32))).astype(x.dtype)


def _normalise(x: Array, eps: float) -> Array:
    x = x.astype(jnp.float32)
    return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
