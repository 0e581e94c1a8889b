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
    """Computes the gated delta rule for 1 to 16 tokens a row, on a state that is kept between calls.

    The rule is that of `gated_delta`; here the state goes in and comes out. Donate it to `jax.jit` to change it in
    place.

    Numerics: tokens one by one in float32, whatever the dtypes; the state is rounded to its dtype once a call. With a
    bfloat16 state the roundings of many calls add up, over as many tokens as a head remembers, to a percent or so. An
    output that the dtype of `v` cannot hold, past 65504 with float16, is infinite; the state is not.

    Args:
        q: Queries, bfloat16, float16 or float32, `1 <= T <= 16`. Value head `h` reads the query and key of head
            `h // (HV // H)`.
        k: Keys, of the dtype of `q`.
        v: Values, of the dtype of `q`. `HV` is a multiple of `H`.
        g: Decay of the state at each token as a natural logarithm, `g <= 0`, any floating dtype.
        beta: Step size, any floating dtype, usually in [0, 1].
        state: The state of each row, float32 or bfloat16; or with `state_indices` a pool of `P` states.
        scale: Factor of the output, a Python number. The default is `K ** -0.5`.
        qk_l2norm: Whether to divide queries and keys by `sqrt(|x|^2 + 1e-6)` first.
        state_indices: Int32; the place of each row's state in the pool. No two active rows may share one. A row whose
            index is negative or past the pool is inactive: it writes nothing and its output is 0.
        valid_lengths: Int32 from 0 to `T`; tokens of a row at or past it change nothing, and their outputs are 0.
        return_states: Whether to return the state after each token too, as speculative decoding needs it.
        implementation: `None` or `"xla"`: plain JAX. `"cuda"` raises: there is no kernel of the step.

    Returns:
        `o [B, T, HV, V]` in the dtype of `v`; the new `state`, of the shape and dtype of the old; and where
        `return_states` is true the states after each token, `[B, T, HV, K, V]` in the dtype of `state`.

    Raises:
        TypeError: An argument of a wrong type or dtype.
        ValueError: Shapes that do not fit together, or a `T` outside 1 to 16. The message gives the numbers.
    """
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
