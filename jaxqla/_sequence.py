"""Tokens split over devices: each takes its piece of every row, and hands on what the piece does to the state.

A piece maps the state that enters it to the one that leaves it, `S -> M S + N` per value head: `N` is the final state
of the piece from a zero state, `M` that of the same keys, gates and steps with zero values, from the identity. Both are
calls of the op, so they run on its kernels where it does. The maps of all devices are gathered, `K (K + V)` float32
numbers a value head and row, and every device composes those before its own: for the few devices of such an axis that
is cheaper than log n exchanges that wait for each other. Then the op runs on the piece from the state that enters it.
Nothing is approximated; the work is that of three calls.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxqla import _math, _transforms

_HIGHEST = lax.Precision.HIGHEST


def gated_delta(
    options: _transforms.Options,
    axis: str,
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T HV V"],
    g: Float[Array, "B T HV"],
    beta: Float[Array, "B T HV"],
    initial_state: Float[Array, "B HV K V"] | None,
    segment_ids: Int[Array, "B T"] | None,
) -> tuple[Float[Array, "B T HV V"], Float[Array, "B HV K V"] | None]:
    """The op on this device's piece of the tokens; the final state, the same on all devices, is that of the rows."""
    state_of = dataclasses.replace(options, return_final_state=True)
    B, _, _, K = q.shape
    HV, V = v.shape[2:]

    def final_state(values: Array, state: Array | None) -> Array:
        return _transforms.gated_delta(state_of, k, k, values, g, beta, state, segment_ids, None)[1]

    identity = jnp.broadcast_to(jnp.eye(K, dtype=jnp.float32), (B, HV, K, K))
    M = final_state(jnp.zeros((*v.shape[:3], K), v.dtype), identity)
    N = final_state(v, None)
    anew = None if segment_ids is None else _starts_anew(segment_ids, axis)[:, None, None, None]
    if anew is not None:
        M = jnp.where(anew, 0, M)

    maps = lax.all_gather(jnp.concatenate([M, N], axis=-1), axis)
    state = jnp.zeros((B, HV, K, V), jnp.float32) if initial_state is None else initial_state
    entering = state = _math.vary_like(state, maps)
    place, size = lax.axis_index(axis), lax.axis_size(axis)
    for piece in range(size):
        entering = jnp.where(place == piece, state, entering)
        M, N = maps[piece, ..., :K], maps[piece, ..., K:]
        state = jnp.einsum("bhkj,bhjv->bhkv", M, state, precision=_HIGHEST) + N
    if anew is not None:
        entering = jnp.where(anew, 0, entering)
    here = dataclasses.replace(options, return_final_state=False)
    o, _ = _transforms.gated_delta(here, q, k, v, g, beta, entering, segment_ids, None)
    if not options.return_final_state:
        return o, None
    # The sum of one state and zeros is that state, and has the type of a result that all devices share.
    return o, lax.psum(jnp.where(place == size - 1, state, 0), axis)


def _starts_anew(segment_ids: Int[Array, "B T"], axis: str) -> Bool[Array, " B"]:
    """Whether the first token of this piece is of another segment than the last one before it; padding is neither."""
    T = segment_ids.shape[1]
    is_token = segment_ids != 0
    first = jnp.take_along_axis(segment_ids, jnp.argmax(is_token, axis=1)[:, None], axis=1)[:, 0]
    last = jnp.take_along_axis(segment_ids, T - 1 - jnp.argmax(is_token[:, ::-1], axis=1)[:, None], axis=1)[:, 0]
    lasts = lax.all_gather(last, axis)
    before: Any = jnp.zeros_like(last)
    place = lax.axis_index(axis)
    for piece in range(lax.axis_size(axis)):
        before = jnp.where((piece < place) & (lasts[piece] != 0), lasts[piece], before)
    return (first != 0) & (before != 0) & (first != before)
