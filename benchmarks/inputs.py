"""The inputs of a row: made once with JAX, which owns the memory, and lent to PyTorch through DLPack without a copy.

JAX is the owner because its runtime is the one that must not see memory vanish under an enqueued program; a torch
tensor made from a JAX array keeps that array alive, and nothing here writes to an input.
"""

import math
from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from benchmarks.rows import Row

BEYOND_L2_BYTES = 120 * 2**20
_SLACK = 1 << 16
_STRIDE = 4099  # prime: the sets start at unrelated places of the pool


class Inputs(NamedTuple):
    """One set of inputs, packed: B is 1. `do` and `dfinal_state` are None where no gradient is asked for."""

    q: Array
    k: Array
    v: Array
    g: Array
    beta: Array
    initial_state: Array
    cu_seqlens: Array
    do: Array | None = None
    dfinal_state: Array | None = None


class Pool(NamedTuple):
    """Random numbers from which every set is cut: a row costs slices, not a generator compiled for its shape."""

    q: Array
    k: Array
    v: Array
    do: Array | None
    g: Array
    beta: Array
    state: Array


def set_bytes(row: Row) -> int:
    """Bytes that one call reads of its q, k, v, g and beta."""
    return row.T * (2 * 2 * row.H * row.K + 2 * row.HV * row.V + 2 * 4 * row.HV)


def num_sets(row: Row, beyond: int = BEYOND_L2_BYTES) -> int:
    """Sets to rotate over so that together they do not fit the L2 cache; at most 24."""
    return min(24, max(1, math.ceil(beyond / set_bytes(row))))


def make_pool(rows: Iterable[Row], *, gradients: bool, seed: int = 0) -> Pool:
    """Draws enough for the largest of `rows`."""
    rows = list(rows)
    keys = max(row.T * row.H for row in rows) + _SLACK
    values = max(row.T * row.HV * row.V for row in rows) + _SLACK
    gates = max(row.T * row.HV for row in rows) + _SLACK
    states = max(row.items * row.K * row.V for row in rows) + _SLACK
    return _draw(jax.random.key(seed), keys, values, gates, states, rows[0].K, gradients)


@partial(jax.jit, static_argnums=(1, 2, 3, 4, 5, 6))
def _draw(key: Array, keys: int, values: int, gates: int, states: int, K: int, gradients: bool) -> Pool:
    of = dict(zip(Pool._fields, jax.random.split(key, len(Pool._fields)), strict=True))

    def unit(key: Array) -> Array:
        x = jax.random.normal(key, (keys, K))
        return (x / jnp.linalg.norm(x, axis=-1, keepdims=True)).astype(jnp.bfloat16)

    return Pool(
        q=unit(of["q"]),
        k=unit(of["k"]),
        v=jax.random.normal(of["v"], (values,)).astype(jnp.bfloat16),
        do=jax.random.normal(of["do"], (values,)).astype(jnp.bfloat16) if gradients else None,
        g=jax.nn.log_sigmoid(jax.random.normal(of["g"], (gates,))) / 16,
        beta=jax.nn.sigmoid(jax.random.normal(of["beta"], (gates,))),
        state=jax.random.normal(of["state"], (states,)),
    )


def make_inputs(pool: Pool, row: Row, index: int) -> Inputs:
    """Set `index` of a row: unit q, k, normal v, g = logsigmoid(normal)/16, every fourth head 0, beta = sigmoid."""
    return _cut(pool, index * _STRIDE % _SLACK, row)


@partial(jax.jit, static_argnums=2)
def _cut(pool: Pool, offset: int, row: Row) -> Inputs:
    def cut(flat: Array, *shape: int) -> Array:
        size = math.prod(shape) if flat.ndim == 1 else math.prod(shape[:-1])
        return jax.lax.dynamic_slice_in_dim(flat, offset, size).reshape(shape)

    T, H, HV, N, K, V = row.T, row.H, row.HV, row.N, row.K, row.V
    decays = (jnp.arange(HV) % 4 != 0).astype(jnp.float32)
    state = cut(pool.state, N, HV, K, V)
    gradients = pool.do is not None
    return Inputs(
        q=cut(pool.q, 1, T, H, K),
        k=cut(pool.k, 1, T, H, K),
        v=cut(pool.v, 1, T, HV, V),
        g=cut(pool.g, 1, T, HV) * decays,
        beta=cut(pool.beta, 1, T, HV),
        initial_state=state,
        cu_seqlens=jnp.cumsum(jnp.asarray((0, *row.lengths)), dtype=jnp.int32),
        do=cut(pool.do, 1, T, HV, V) if gradients else None,
        dfinal_state=state[:, ::-1] / 8 if gradients else None,
    )


def abstract_inputs(row: Row, *, gradients: bool) -> Inputs:
    """Shapes and dtypes of a set, for compiling before any set exists."""

    def array(dtype: Any, *shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    T, H, HV, N, K, V = row.T, row.H, row.HV, row.N, row.K, row.V
    bf16, f32 = jnp.bfloat16, jnp.float32
    return Inputs(
        q=array(bf16, 1, T, H, K),
        k=array(bf16, 1, T, H, K),
        v=array(bf16, 1, T, HV, V),
        g=array(f32, 1, T, HV),
        beta=array(f32, 1, T, HV),
        initial_state=array(f32, N, HV, K, V),
        cu_seqlens=array(jnp.int32, N + 1),
        do=array(bf16, 1, T, HV, V) if gradients else None,
        dfinal_state=array(f32, N, HV, K, V) if gradients else None,
    )


def to_torch(array: Array) -> Any:
    """The same memory as a torch tensor."""
    import torch

    tensor = torch.from_dlpack(array)
    assert tensor.data_ptr() == array.unsafe_buffer_pointer(), "DLPack copied an input"
    return tensor
