"""The gates of a Gated DeltaNet layer."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxqla import _checks

# exp(88) is the largest power of e with a whole exponent that float32 holds.
MAX_A_LOG = 88.0
# exp(-1e6) is 0 in every dtype, and sums of many such gates stay finite.
MIN_G = -1e6


def gdn_gates(
    a: Float[Array, "*rows HV"],
    b: Float[Array, "*rows HV"],
    A_log: Float[Array, " HV"],
    dt_bias: Float[Array, " HV"],
    *,
    allow_neg_eigval: bool = False,
) -> tuple[Float[Array, "*rows HV"], Float[Array, "*rows HV"]]:
    """Computes the decay `g` and the step size `beta` of `gated_delta` from what a layer projects.

        g    = -exp(A_log) softplus(a + dt_bias)
        beta = sigmoid(b), twice that with `allow_neg_eigval`

    Numerics: all of it in float32, whatever the dtypes, so that no gate is rounded to bfloat16. Values and gradients
    are finite for all finite arguments: `A_log` counts as 88 at most, and `g` is -1e6 at least, with no gradient
    beyond. Both are without effect on `exp(g)` unless `A_log > 88`, which no float32 layer can mean.

    Args:
        a: Projection for the decay, any floating dtype; one number for each token and value head.
        b: Projection for the step size, of the shape of `a`, any floating dtype.
        A_log: Natural logarithm of the rate of each value head, any floating dtype; stored in float32 for choice.
        dt_bias: What is added to `a`, for each value head, any floating dtype.
        allow_neg_eigval: Whether step sizes go up to 2, which gives the transition of the state eigenvalues down to -1.

    Returns:
        `g <= 0` and `beta`, float32, of the shape of `a`.

    Raises:
        TypeError: An argument has the wrong type or dtype.
        ValueError: A shape breaks a rule above.

    Sources: Yang, Kautz, Hatamizadeh, "Gated Delta Networks: Improving Mamba2 with Delta Rule", ICLR 2025; for
    `allow_neg_eigval` Grazzi et al., "Unlocking State-Tracking in Linear RNNs Through Negative Eigenvalues", ICLR 2025.
    """
    named = {"a": a, "b": b, "A_log": A_log, "dt_bias": dt_bias}
    _checks.check_arrays("gdn_gates", named, {})
    named = {name: jnp.asarray(x) for name, x in named.items()}
    _checks.check_gates("gdn_gates", **named, allow_neg_eigval=allow_neg_eigval)
    a, b, A_log, dt_bias = (x.astype(jnp.float32) for x in named.values())
    # A sum that overflows would make NaN of a rate of zero.
    dt = jax.nn.softplus(jnp.minimum(a + dt_bias, jnp.finfo(jnp.float32).max))
    g = -jnp.exp(jnp.minimum(A_log, MAX_A_LOG)) * dt
    beta = jax.nn.sigmoid(b)
    return jnp.maximum(g, MIN_G), 2 * beta if allow_neg_eigval else beta
