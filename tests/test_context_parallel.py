"""Tokens split over 2, 4 and 8 devices: values and gradients of one device, with documents that cross devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxqla
from tests import cases
from tests.compiled import compile_quickly

T, TAPS = 8, 4


def arrays_of():
    """Arguments of the convolution, then those of the recurrence that it does not make, and segments."""
    rng = np.random.default_rng(0)
    # Heads that never forget, that forget slowly, and that forget at once; and one that does each in turn.
    gates = np.stack([np.zeros(T), np.full(T, -0.02), np.full(T, -5.0), -5 * rng.uniform(size=T) ** 4], axis=-1)
    x = cases.make(B=3, T=T, H=2, HV=4, K=4, V=3, dtype="float32", gates=gates, initial_state=True, seed=1)
    # Documents of any length, padding in and between them; one document; whole devices of padding at both ends.
    ids = np.sort(rng.integers(1, 4, (3, T)), axis=1) * (rng.random((3, T)) < 0.8)
    ids[1] = 7
    ids[2, : T // 2], ids[2, -1:] = 0, 0
    width = 2 * 4 * 2 + 3 * 4
    mixed = rng.standard_normal((3, T, width)).astype(np.float32)
    weight, bias = rng.standard_normal((TAPS, width)).astype(np.float32), rng.standard_normal(width).astype(np.float32)
    conv_state = rng.standard_normal((3, TAPS - 1, width)).astype(np.float32)
    return (mixed, weight, bias, conv_state, x.g, x.beta, x.initial_state), ids.astype(np.int32)


def layer(segment_ids, mixed, weight, bias, conv_state, g, beta, state, *, sequence_axis=None):
    """Convolution and recurrence, as a layer has them."""
    options = {"segment_ids": segment_ids, "return_final_state": True, "sequence_axis": sequence_axis}
    y, conv_state = jaxqla.causal_conv1d(mixed, weight, bias, activation="silu", initial_state=conv_state, **options)
    q, k, v = (
        x.reshape(*x.shape[:2], heads, -1) for x, heads in zip(jnp.split(y, [8, 16], -1), (2, 2, 4), strict=True)
    )
    o, state = jaxqla.gated_delta(q, k, v, g, beta, initial_state=state, qk_l2norm=True, **options)
    return o, conv_state, state


def with_gradients(function, segment_ids, arrays):
    """Results, and gradients of a sum of them with weights that all differ."""
    results, vjp = jax.vjp(functools.partial(function, segment_ids), *arrays)
    cotangents = [jnp.sin(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape) for x in results]
    return results, vjp(tuple(cotangents))


def run(function, *arguments):
    return compile_quickly(function.lower(*arguments))(*arguments)


def assert_equal(actual, expected):
    for x, truth in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
        assert np.abs(np.asarray(x) - truth).max() <= 1e-5 * np.abs(truth).max()


@functools.cache
def on_one_device(packed):
    arrays, ids = arrays_of()
    return run(jax.jit(functools.partial(with_gradients, layer)), ids if packed else None, arrays)


def split(mesh, packed):
    tokens, rows = P(None, "context"), P()
    specs = (tokens, rows, rows, rows, tokens, tokens, rows)
    local = functools.partial(layer, sequence_axis="context")
    return jax.shard_map(
        local, mesh=mesh, in_specs=(tokens if packed else None, *specs), out_specs=(tokens, rows, rows)
    )


# Pieces of 4, 2 and 1 tokens: as long as the convolution and shorter.
@pytest.mark.parametrize(("devices", "packed"), [(2, True), (4, True), (4, False), (8, True), (8, False)])
def test_values_and_gradients_are_those_of_one_device(devices, packed):
    arrays, ids = arrays_of()
    mesh = jax.make_mesh((devices,), ("context",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])
    function = jax.jit(functools.partial(with_gradients, split(mesh, packed)))
    actual = run(function, ids if packed else None, arrays)
    assert_equal(actual, on_one_device(packed))


def test_tokens_rows_and_heads_are_split_at_once():
    (*_, g, beta, state), ids = arrays_of()
    x = cases.make(B=4, T=T, H=2, HV=4, K=4, V=3, dtype="float32")
    arrays = (*x[:3], *(jnp.concatenate([y, y[:1]]) for y in (g, beta, state)))
    ids = np.concatenate([ids, ids[1:2]])

    def op(segment_ids, q, k, v, g, beta, state, **named):
        return jaxqla.gated_delta(
            q, k, v, g, beta, initial_state=state, segment_ids=segment_ids, return_final_state=True, **named
        )

    mesh = jax.make_mesh((2, 2, 2), ("data", "context", "tensor"), axis_types=(AxisType.Explicit,) * 3)
    split = functools.partial(op, mesh=mesh, batch_axis="data", head_axis="tensor", sequence_axis="context")
    actual, truth = (run(jax.jit(functools.partial(with_gradients, f)), ids, arrays) for f in (split, op))
    assert_equal(actual, truth)
    assert actual[0][0].sharding.spec[:3] == ("data", "context", "tensor")
