"""Mathematics shared by the paths."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

L2NORM_EPS = 1e-6


def l2norm(x: Float[Array, "*rows K"]) -> Float[Array, "*rows K"]:
    """Scales the vectors of the last axis by `1 / sqrt(|x|^2 + 1e-6)`, computed in float32, in the dtype of `x`."""
    y = x.astype(jnp.float32)
    return (y * lax.rsqrt(jnp.sum(y * y, axis=-1, keepdims=True) + L2NORM_EPS)).astype(x.dtype)
