"""The recurrence token by token in plain JAX, for the few tokens of a step."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxqla import _math, _slots


def forward(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T HV V"],
    g: Float[Array, "B T HV"],
    beta: Float[Array, "B T HV"],
    state: Float[Array, "P HV K V"],
    state_indices: Int[Array, " B"] | None,
    valid_lengths: Int[Array, " B"] | None,
    *,
    scale: float,
    qk_l2norm: bool,
) -> tuple[Float[Array, "B T HV V"], Float[Array, "P HV K V"], Float[Array, "B T HV K V"]]:
    """Computes outputs, in the dtype of `v`, the new states or pool, and the state after each token.

    The arguments are those of `jaxqla.gated_delta_step`, after its checks.
    """
    T, HV = v.shape[1:3]
    is_token = _slots.tokens(T, state, state_indices, valid_lengths)
    # Masked before anything is computed from them, so that no NaN reaches a result or a gradient.
    q, k, v, g, beta = (_slots.keep(is_token, x) for x in (q, k, v, g, beta))
    if qk_l2norm:
        q, k = _math.l2norm(q), _math.l2norm(k)
    q, k = (jnp.repeat(x, HV // x.shape[2], axis=2) for x in (q, k))
    arrays = [x.astype(jnp.float32) for x in (q, k, v, g, beta)]
    tokens = [None if x is None else jnp.moveaxis(x, 1, 0) for x in (*arrays, is_token)]

    def step(S, token):
        q, k, v, g, beta, is_token = token
        decay = jnp.exp(g)[..., None]
        # Both reads are of the state before the write, so that one pass over it gives both.
        erase, read = (decay * jnp.sum(x[..., None] * S, axis=-2) for x in (k, q))
        u = beta[..., None] * (v - erase)
        o = scale * (read + jnp.sum(q * k, axis=-1, keepdims=True) * u)
        S_next = decay[..., None] * S + k[..., None] * u[..., None, :]
        if is_token is not None:
            o = _slots.keep(is_token, o)
            S_next = jnp.where(is_token[:, None, None, None], S_next, S)
        return S_next, (o, S_next.astype(state.dtype))

    S = _math.vary_like(_slots.read(state, state_indices).astype(jnp.float32), *arrays)
    S, (o, states) = lax.scan(step, S, tokens, unroll=True)
    return jnp.moveaxis(o, 0, 1).astype(v.dtype), _slots.write(state, state_indices, S), jnp.moveaxis(states, 0, 1)
