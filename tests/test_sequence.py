"""Tokens split over devices: equal to one device, gradients too, with documents that cross devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxqla
from jaxqla import ops
from tests import cases
from tests.compiled import compile_quickly
from tests.tolerance import assert_trees_close

TOKENS = P("data", "context")
SPECS = (*[TOKENS] * 5, P("data"))


def inputs_of(T, *, B=2, segment_ids=None):
    # From heads that never forget to those that forget in a token.
    gates = np.broadcast_to(np.array([0.0, -0.01, -0.5, -5.0]), (B, T, 4))
    return cases.make(
        B=B, T=T, H=2, HV=4, K=8, V=6, dtype="float32", gates=gates, initial_state=True, segment_ids=segment_ids
    )


def whole(q, k, v, g, beta, state, segment_ids=None):
    return jaxqla.gated_delta(q, k, v, g, beta, initial_state=state, segment_ids=segment_ids, return_final_state=True)


def split(devices, rows=1):
    mesh = jax.make_mesh((rows, devices), ("data", "context"), axis_types=(AxisType.Auto,) * 2)

    def piece(q, k, v, g, beta, state, segment_ids=None):
        return jaxqla.gated_delta(
            q,
            k,
            v,
            g,
            beta,
            initial_state=state,
            segment_ids=segment_ids,
            return_final_state=True,
            sequence_axis="context",
        )

    def call(*arrays):
        specs = SPECS if len(arrays) == 6 else (*SPECS, TOKENS)
        return jax.shard_map(piece, mesh=mesh, in_specs=specs, out_specs=(TOKENS, P("data")))(*arrays)

    return call


def run(function, arrays):
    return compile_quickly(jax.jit(function).lower(*arrays))(*arrays)


def loss_of(function):
    return lambda *arrays: sum(jnp.sum(jnp.sin(x)) for x in function(*arrays))


@pytest.mark.parametrize(("devices", "rows", "T"), [(2, 2, 140), (4, 1, 12), (8, 1, 200)])
def test_it_equals_one_device(devices, rows, T):
    arrays = inputs_of(T)[:6]
    assert_trees_close(run(split(devices, rows), arrays), run(whole, arrays))


def test_documents_cross_devices():
    T, devices = 160, 4
    ids = np.zeros((2, T), np.int32)
    # Within a device, across two, across three with a device of padding inside, and a boundary at a device's edge.
    ids[0, :30], ids[0, 30:40], ids[0, 120:150], ids[0, 150:] = 1, 2, 2, 3
    ids[1, 3:80], ids[1, 80:121], ids[1, 121:] = 1, 2, 3
    arrays = inputs_of(T, segment_ids=ids)[:7]
    assert_trees_close(run(split(devices), arrays), run(whole, arrays))
    gradients = [run(jax.grad(loss_of(f), argnums=range(6)), arrays) for f in (split(devices), whole)]
    assert_trees_close(*gradients)


def test_without_states():
    inputs = inputs_of(40)
    mesh = jax.make_mesh((8,), ("context",), axis_types=(AxisType.Auto,))
    piece = jax.shard_map(
        lambda *x: jaxqla.gated_delta(*x, sequence_axis="context")[0],
        mesh=mesh,
        in_specs=P(None, "context"),
        out_specs=P(None, "context"),
    )
    assert_trees_close(run(piece, inputs[:5]), jaxqla.gated_delta(*inputs[:5])[0])


def test_pieces_run_on_kernels(monkeypatch):
    monkeypatch.setattr(ops, "_cuda_capabilities", frozenset)
    mesh = jax.make_mesh((8,), ("context",), axis_types=(AxisType.Auto,))
    piece = jax.shard_map(
        lambda *x: jaxqla.gated_delta(*x, sequence_axis="context", implementation="cuda")[0],
        mesh=mesh,
        in_specs=P(None, "context"),
        out_specs=P(None, "context"),
    )
    tokens = [jax.ShapeDtypeStruct((2, 800, heads, 128), jnp.bfloat16) for heads in (2, 2, 4)]
    gates = [jax.ShapeDtypeStruct((2, 800, 4), jnp.float32)] * 2
    text = jax.jit(piece).trace(*tokens, *gates).lower(lowering_platforms=("cuda",)).as_text()
    assert "tensor<200x2x128xbf16>" in text
    assert 'kernel = "gdn_fused_forward_bf16_v64"' in text


def test_an_axis_that_is_not_manual_is_refused():
    inputs = inputs_of(16)
    with pytest.raises(
        ValueError, match=r"sequence_axis must name a manual mesh axis .*\(manual: \[\]\), got 'context'"
    ):
        jaxqla.gated_delta(*inputs[:5], sequence_axis="context")


def test_boundaries_are_refused():
    inputs = inputs_of(16, B=1)
    mesh = jax.make_mesh((2,), ("context",), axis_types=(AxisType.Auto,))

    def piece(*arrays):
        return jaxqla.gated_delta(*arrays, cu_seqlens=jnp.asarray([0, 8]), sequence_axis="context")[0]

    with pytest.raises(ValueError, match="cu_seqlens must be None where sequence_axis is given"):
        jax.shard_map(piece, mesh=mesh, in_specs=P(None, "context"), out_specs=P(None, "context"))(*inputs[:5])
