"""The public operator of the recurrence for a few tokens."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxqla import _checks, _step


def gated_delta_step(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T HV V"],
    g: Float[Array, "B T HV"],
    beta: Float[Array, "B T HV"],
    state: Float[Array, "B HV K V"] | Float[Array, "P HV K V"],
    *,
    scale: float | None = None,
    qk_l2norm: bool = False,
    state_indices: Int[Array, " B"] | None = None,
    valid_lengths: Int[Array, " B"] | None = None,
    return_states: bool = False,
    implementation: str | None = None,
) -> tuple[Array, ...]:
    """Computes the gated delta rule for 1 to 16 tokens a row, on a state that is kept between calls."""
    arrays = (q, k, v, g, beta, state, state_indices, valid_lengths)
    names = ("q", "k", "v", "g", "beta", "state", "state_indices", "valid_lengths")
    named = dict(zip(names, arrays, strict=True))
    optional = {name: named[name] for name in names[6:]}
    _checks.check_arrays("gated_delta_step", {name: named[name] for name in names[:6]}, optional)
    named = jax.tree.map(jnp.asarray, named)
    _checks.check_step(
        "gated_delta_step",
        **named,
        scale=scale,
        qk_l2norm=qk_l2norm,
        return_states=return_states,
        implementation=implementation,
    )
    o, state, states = _step.forward(
        **named,
        scale=named["q"].shape[3] ** -0.5 if scale is None else float(scale),
        qk_l2norm=bool(qk_l2norm),
    )
    return (o, state, states) if return_states else (o, state)
