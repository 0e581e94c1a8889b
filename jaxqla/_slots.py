"""States that are kept between steps: of rows, or in a pool of slots that rows point into."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Shaped


def read(state: Float[Array, "P *S"], indices: Int[Array, " B"] | None) -> Float[Array, "B *S"]:
    """The states of the rows; zero, whatever the pool holds, for a row that points outside it."""
    if indices is None:
        return state
    active = _is_inside(state, indices)
    return keep(active, jnp.take(state, jnp.where(active, indices, 0), axis=0, mode="clip"))


def write(
    state: Float[Array, "P *S"], indices: Int[Array, " B"] | None, rows: Float[Array, "B *S"]
) -> Float[Array, "P *S"]:
    """The pool with the states of the rows, in its own dtype; a row that points outside it writes nothing."""
    rows = rows.astype(state.dtype)
    if indices is None:
        return rows
    # Distinct places outside, so that indices are as unique as the caller made them.
    outside = state.shape[0] + np.arange(indices.shape[0], dtype=np.int32)
    places = jnp.where(_is_inside(state, indices), indices, outside)
    return state.at[places].set(rows, mode="drop", unique_indices=True)


def tokens(
    T: int,
    state: Float[Array, "P *S"],
    indices: Int[Array, " B"] | None,
    valid_lengths: Int[Array, " B"] | None,
) -> Bool[Array, "B T"] | None:
    """Which tokens count: of rows that point into the pool, those before the row's valid length. None for all."""
    if indices is None and valid_lengths is None:
        return None
    mask = jnp.ones((1, T), bool)
    if valid_lengths is not None:
        mask = mask & (np.arange(T, dtype=np.int32) < valid_lengths[:, None])
    if indices is not None:
        mask = mask & _is_inside(state, indices)[:, None]
    return mask


def keep(mask: Bool[Array, "..."] | None, x: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
    """`x` where the mask of its leading axes is true, else 0; all of it without a mask."""
    return x if mask is None else jnp.where(mask.reshape(*mask.shape, *[1] * (x.ndim - mask.ndim)), x, 0)


def _is_inside(state: Array, indices: Int[Array, " B"]) -> Bool[Array, " B"]:
    return (indices >= 0) & (indices < state.shape[0])
