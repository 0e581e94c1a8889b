"""What a row must give: the token-by-token oracle in float64, on some heads of the row, and the distance from it.

The oracle walks tokens one after the other, so the row is unpacked into one line per sequence, all of them walked at
once, and only one group of value heads (with its query and key head) is computed. Gradients are taken through pieces of
the walk that are recomputed, because one state of float64 per token does not fit.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from benchmarks.inputs import Inputs
from benchmarks.rows import Row

_PIECE = 256
GRADIENTS = ("dq", "dk", "dv", "dg", "dbeta", "dinitial_state")


@dataclass(frozen=True)
class Subset:
    """The heads that are compared: whole groups, with both kinds of gate (every fourth head does not decay)."""

    key_heads: int
    value_heads: int


def subset(row: Row) -> Subset:
    ratio = row.HV // row.H
    key_heads = min(row.H, 1 if ratio > 1 else 2)
    return Subset(key_heads, key_heads * ratio)


def expected(row: Row, inputs: Inputs, direction: str, *, one_state: bool = False) -> dict[str, np.ndarray]:
    """Results of `direction` on the subset of heads, as float64.

    `one_state`: only the first sequence is given its initial state and only the last one's final state is compared, for
    an implementation that packs by segment ids and has one state a row.
    """
    with jax.enable_x64(True):
        lines = _unpack(row, inputs, one_state)
        forward, backward = direction != "backward", direction != "forward"
        results = _run(lines, forward, backward)
        return _pack(row, {name: np.asarray(x) for name, x in results.items()}, one_state)


def compared_heads(row: Row, name: str, x: Any) -> Any:
    """The subset of heads of one result of an implementation; slices any kind of array."""
    heads = subset(row)
    if name in ("final_state", "dinitial_state"):
        return x[:, : heads.value_heads]
    return x[:, :, : heads.key_heads if name in ("dq", "dk") else heads.value_heads]


def relative_rms(got: np.ndarray, want: np.ndarray) -> float:
    """Root mean square of the difference over that of the truth; NaN where `got` has one."""
    return float(np.linalg.norm((got - want).ravel()) / max(np.linalg.norm(want.ravel()), np.finfo(np.float64).tiny))


def errors(results: Mapping[str, np.ndarray], want: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Relative RMS error of each result that was compared."""
    return {name: relative_rms(np.asarray(x, np.float64), want[name]) for name, x in results.items()}


def _unpack(row: Row, inputs: Inputs, one_state: bool) -> dict[str, Any]:
    """One line per sequence, padded at its end to whole pieces of the longest."""
    heads = subset(row)
    longest = -(-max(row.lengths) // _PIECE) * _PIECE
    starts = np.cumsum((0, *row.lengths))[:-1]
    steps = np.arange(longest)
    inside = steps < np.asarray(row.lengths)[:, None]
    index = jnp.asarray(np.where(inside, starts[:, None] + steps, 0), jnp.int32)

    def lines(x: Array | None, count: int) -> Array | None:
        return None if x is None else x[0, :, :count][index].astype(jnp.float64)

    def states(x: Array | None) -> Array | None:
        return None if x is None else x[:, : heads.value_heads].astype(jnp.float64)

    initial_state, dfinal_state = states(inputs.initial_state), states(inputs.dfinal_state)
    if one_state:
        given = (np.arange(row.N) == 0)[:, None, None, None]
        asked = (np.arange(row.N) == row.N - 1)[:, None, None, None]
        initial_state = initial_state * given
        dfinal_state = None if dfinal_state is None else dfinal_state * asked
    do = lines(inputs.do, heads.value_heads)
    return {
        "q": lines(inputs.q, heads.key_heads),
        "k": lines(inputs.k, heads.key_heads),
        "v": lines(inputs.v, heads.value_heads),
        "g": lines(inputs.g, heads.value_heads),
        "beta": lines(inputs.beta, heads.value_heads),
        "initial_state": initial_state,
        "ids": jnp.asarray(inside, jnp.int32),
        "do": None if do is None else do * inside[..., None, None],
        "dfinal_state": dfinal_state,
    }


@partial(jax.jit, static_argnums=(1, 2))
def _run(lines: dict[str, Any], forward: bool, backward: bool) -> dict[str, Array]:
    from jaxqla.reference import gated_delta

    num_pieces = lines["q"].shape[1] // _PIECE

    def pieces(x: Array) -> Array:
        return jnp.moveaxis(x.reshape(x.shape[0], num_pieces, _PIECE, *x.shape[2:]), 1, 0)

    def walk(q: Array, k: Array, v: Array, g: Array, beta: Array, state: Array) -> tuple[Array, Array]:
        def piece(state: Array, xs: tuple[Array, ...]) -> tuple[Array, Array]:
            *arrays, ids = xs
            o, state = gated_delta(
                *arrays, initial_state=state, return_final_state=True, segment_ids=ids, dtype=jnp.float64
            )
            return state, o

        xs = tuple(map(pieces, (q, k, v, g, beta, lines["ids"])))
        state, o = jax.lax.scan(jax.checkpoint(piece), state, xs)
        return jnp.moveaxis(o, 0, 1).reshape(v.shape), state

    primals = tuple(lines[name] for name in ("q", "k", "v", "g", "beta", "initial_state"))
    if not backward:
        o, final_state = walk(*primals)
        return {"o": o, "final_state": final_state}
    (o, final_state), vjp = jax.vjp(walk, *primals)
    gradients = dict(zip(GRADIENTS, vjp((lines["do"], lines["dfinal_state"])), strict=True))
    return ({"o": o, "final_state": final_state} if forward else {}) | gradients


def _pack(row: Row, results: dict[str, np.ndarray], one_state: bool) -> dict[str, np.ndarray]:
    """Back to `[1, T, ...]`; states stay `[N, ...]`, or become the one that a segment-id implementation has."""

    def tokens(x: np.ndarray) -> np.ndarray:
        return np.concatenate([line[:length] for line, length in zip(x, row.lengths, strict=True)])[None]

    kept: dict[str, Sequence[int]] = {"final_state": [row.N - 1], "dinitial_state": [0]}
    return {name: (x[kept[name]] if one_state else x) if name in kept else tokens(x) for name, x in results.items()}
