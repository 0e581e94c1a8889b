"""The op on eight devices: split by rows and heads with no collective, equal to one device."""

import contextlib
import functools
import re
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxqla
from jaxqla import ops
from tests import cases
from tests.compiled import collectives, collectives_of, compile_quickly
from tests.tolerance import assert_trees_close

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
CONTEXTS = {
    "auto": (AUTO, AUTO),
    "explicit": (EXPLICIT, EXPLICIT),
    "mixed": (AUTO, EXPLICIT),
    "shard_map": (AUTO, AUTO),
}
# Rows of one, two and no sequences, with padding before, between and after them; and boundaries of several.
SEGMENTS = np.array([[1, 1, 2, 2, 2], [3, 3, 3, 0, 0], [0, 4, 0, 4, 5], [0, 0, 0, 0, 0]], np.int32)
BOUNDARIES = np.array([0, 2, 2, 6], np.int32)


def op(q, k, v, g, beta, initial_state, segment_ids=None, cu_seqlens=None, **named):
    return jaxqla.gated_delta(
        q,
        k,
        v,
        g,
        beta,
        initial_state=initial_state,
        segment_ids=segment_ids,
        cu_seqlens=cu_seqlens,
        return_final_state=True,
        **named,
    )


def specs(rows, heads):
    tokens = P(rows, None, heads, None)
    return (tokens, tokens, tokens, P(rows, None, heads), P(rows, None, heads), P(rows, heads, None, None))


def mesh_of(context, shape=(2, 4)):
    return jax.make_mesh(shape, ("data", "tensor"), axis_types=CONTEXTS[context])


def placed(mesh, arrays, partitions):
    return [
        jax.device_put(np.asarray(x), NamedSharding(mesh, spec)) for x, spec in zip(arrays, partitions, strict=True)
    ]


# -- the matrix: context, heads, packing, forward and gradient, with a mesh set and without ----------------------------


class Case(NamedTuple):
    """A call and its gradients: arrays (cotangents of both results last), how they are split, and the function."""

    arrays: list
    partitions: tuple
    mesh_shape: tuple
    call: Callable

    def with_gradients(self, *arrays):
        """Results, and the gradients of the six floating arguments."""
        results, vjp = jax.vjp(lambda *floats: self.call(*floats, *arrays[6:-2]), *arrays[:6])
        return (*results, *vjp(arrays[-2:]))


@functools.cache
def case(H, HV, packing):
    rows, heads = "data", "tensor" if H > 1 else None
    mesh_shape = (2, 4) if H > 1 else (4, 1)
    kwargs, ids, id_specs, call = {}, [], [], op
    if packing == "segment_ids":
        ids, id_specs = [SEGMENTS], [P("data", None)]
    elif packing == "cu_seqlens":
        # One row: heads alone are split.
        rows, kwargs, ids, id_specs = None, {"cu_seqlens": BOUNDARIES}, [BOUNDARIES], [P(None)]

        def call(*arrays, **named):
            return op(*arrays[:6], cu_seqlens=arrays[6], **named)

    B, T = (1, 7) if packing == "cu_seqlens" else SEGMENTS.shape
    inputs = cases.make(B=B, T=T, H=H, HV=HV, K=4, V=3, dtype="float32", initial_state=True, **kwargs)
    others = cases.make(B=B, T=T, H=H, HV=HV, K=4, V=3, dtype="float32", initial_state=True, seed=1, **kwargs)
    partitions = specs(rows, heads)
    return Case(
        [*inputs[:6], *ids, others.v, others.initial_state],
        (*partitions, *id_specs, partitions[2], partitions[5]),
        mesh_shape,
        call,
    )


@functools.cache
def on_one_device(*names):
    return compile_quickly(jax.jit(case(*names).with_gradients).lower(*case(*names).arrays))(*case(*names).arrays)


CASES = [(4, 4), (4, 8), (8, 24), (1, 8)]
CASES = [(*heads, packing) for heads in CASES for packing in (None, "segment_ids", "cu_seqlens")]
CASES.remove((1, 8, "cu_seqlens"))  # neither rows nor heads could be split


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize(("H", "HV", "packing"), CASES)
def test_split_with_no_collective_and_equal_to_one_device(context, H, HV, packing):
    this = case(H, HV, packing)
    mesh = mesh_of(context, this.mesh_shape)
    shards = placed(mesh, this.arrays, this.partitions)
    results = (*this.partitions[-2:], *this.partitions[:6])
    programs = {}
    for is_set in (False, True):
        both, forward = this.with_gradients, this.call
        if context == "shard_map" and is_set:
            # Gradients inside of it; without a mesh set outside.
            both = jax.shard_map(both, mesh=mesh, in_specs=this.partitions, out_specs=results)
        elif context == "shard_map":
            split = jax.shard_map(forward, mesh=mesh, in_specs=this.partitions[:-2], out_specs=results[:2])
            both = this._replace(call=split).with_gradients
        with jax.set_mesh(mesh) if is_set else contextlib.nullcontext():
            lowered = jax.jit(both).lower(*shards)
        # Compiled once where the program is the same but for the address of our rule.
        programs.setdefault(re.sub(r"\d{9,}", "", lowered.as_text()), lowered)
    if context == "auto":
        # The compiler may split the results of the forward alone otherwise.
        programs["forward"] = jax.jit(this.call).lower(*shards[:-2])
    for lowered in programs.values():
        program = compile_quickly(lowered)
        assert collectives_of(program) == {}
        actual = program(*shards[: len(program.in_avals[0])])
        for x, truth, spec in zip(actual, on_one_device(H, HV, packing), results, strict=False):
            assert x.sharding.is_equivalent_to(NamedSharding(mesh, spec), x.ndim)
            assert np.abs(np.asarray(x) - truth).max() <= 1e-6 * np.abs(truth).max()


# -- a mesh that the call names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("context", "packing"), [("auto", "segment_ids"), ("explicit", None), ("mixed", None), ("auto", "cu_seqlens")]
)
def test_a_named_mesh_is_exported_and_adds_no_collective(context, packing):
    this = case(4, 8, packing)
    mesh = mesh_of(context)
    call = functools.partial(
        this.call, mesh=mesh, batch_axis=None if packing == "cu_seqlens" else "data", head_axis="tensor"
    )
    # Without these jax has no file format for results on a mixed mesh.
    results = tuple(NamedSharding(mesh, spec) for spec in (*this.partitions[-2:], *this.partitions[:6]))
    function = jax.jit(this._replace(call=call).with_gradients, out_shardings=results)
    shards = placed(mesh, this.arrays, this.partitions)
    exported = jax.export.deserialize(jax.export.export(function)(*shards).serialize())
    assert exported.nr_devices == 8
    program = compile_quickly(jax.jit(exported.call).lower(*shards))
    assert collectives_of(program) == {}
    assert_trees_close(program(*shards), on_one_device(4, 8, packing))


def test_a_named_mesh_splits_what_comes_in_one_piece():
    this = case(4, 8, None)
    mesh = jax.make_mesh((2, 2, 2), ("data", "more", "tensor"), axis_types=(AUTO,) * 3)
    call = jax.jit(functools.partial(this.call, mesh=mesh, batch_axis=("data", "more"), head_axis="tensor"))
    program = compile_quickly(call.lower(*this.arrays[:6]))
    o, state = program(*this.arrays[:6])
    assert o.sharding.is_equivalent_to(NamedSharding(mesh, P(("data", "more"), None, "tensor")), 4)
    assert state.sharding.is_equivalent_to(NamedSharding(mesh, P(("data", "more"), "tensor")), 4)
    assert_trees_close((o, state), on_one_device(4, 8, None)[:2])


WRONG_NAMES = {
    "no mesh": ({"mesh": None, "head_axis": "tensor"}, "head_axis must be None where mesh is None, got 'tensor'"),
    "no such axis": ({"batch_axis": "rows"}, r"batch_axis must name axes of the mesh \('data', 'tensor'\), .* 'rows'"),
    "twice": ({"batch_axis": "tensor", "head_axis": ("tensor",)}, r"head_axis must name axes .* each once, got \('ten"),
    "tokens twice": ({"batch_axis": "data", "sequence_axis": "data"}, "sequence_axis must name axes .* got 'data'"),
    "rows": ({"batch_axis": ("data", "tensor")}, "batch_axis must have a size that divides B = 4, got 8"),
    "heads": ({"head_axis": "tensor"}, "head_axis must have a size that divides H = 1, got 4"),
    "tokens": ({"sequence_axis": "data"}, "sequence_axis must have a size that divides T = 5, got 2"),
    "mesh": ({"mesh": 8}, "mesh must be a jax.sharding.Mesh or None, got int"),
}


@pytest.mark.parametrize(("named", "text"), WRONG_NAMES.values(), ids=WRONG_NAMES)
def test_wrong_names_are_told(named, text):
    arrays = case(1, 8, None).arrays[:6]
    with pytest.raises((TypeError, ValueError), match=f"^gated_delta: {text}"):
        op(*arrays, **{"mesh": mesh_of("auto")} | named)


def test_a_mesh_is_not_named_inside_shard_map():
    mesh, arrays = mesh_of("auto"), case(4, 8, None).arrays[:6]
    local = jax.shard_map(lambda *x: op(*x, mesh=mesh)[0], mesh=mesh, in_specs=specs("data", None), out_specs=P("data"))
    with pytest.raises(ValueError, match=r"mesh must be None inside shard_map \(manual: \['data', 'tensor'\]\)"):
        local(*arrays)


# -- other contexts ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("context", ["auto", "explicit", "mixed"])
def test_arrays_of_one_device_where_a_mesh_is_set(context):
    this = case(4, 8, None)
    expected = on_one_device(4, 8, None)
    with jax.set_mesh(mesh_of(context)):
        for arrays in (this.arrays, [np.asarray(x) for x in this.arrays]):
            actual = compile_quickly(jax.jit(this.with_gradients).lower(*arrays))(*arrays)
            assert_trees_close(actual, expected)


def test_a_mapped_axis_may_be_split():
    inputs = [cases.make(B=2, T=70, H=4, HV=8, K=8, V=8, dtype="float32", seed=i) for i in range(2)]
    stacked = [jnp.stack(x) for x in zip(*(x[:5] for x in inputs), strict=True)]
    mesh = mesh_of("auto")
    partitions = [P("data", None, None, "tensor", *[None] * (x.ndim - 4)) for x in stacked]
    mapped = jax.jit(jax.vmap(lambda *x: jaxqla.gated_delta(*x)[0]))
    shards = placed(mesh, stacked, partitions)
    assert collectives(mapped, *shards) == {}
    assert_trees_close(mapped(*shards), mapped(*stacked))


def test_a_replicated_argument_gets_one_sum_of_gradients():
    inputs = cases.make(B=4, T=70, H=4, HV=8, K=8, V=8, dtype="float32")
    mesh = mesh_of("shard_map")
    partitions = specs("data", "tensor")[:5]

    def total(rate, *arrays):
        def local(rate, q, k, v, g, beta):
            return jaxqla.gated_delta(q, k, v, g * rate, beta)[0]

        return jnp.sum(
            jnp.sin(
                jax.shard_map(local, mesh=mesh, in_specs=(P(), *partitions), out_specs=partitions[2])(rate, *arrays)
            )
        )

    gradient = jax.jit(jax.grad(total))
    shards = placed(mesh, inputs[:5], partitions)
    assert collectives(gradient, jnp.float32(0.5), *shards) == {"all-reduce": 1}

    def alone(rate):
        return jnp.sum(jnp.sin(jaxqla.gated_delta(*inputs[:3], inputs.g * rate, inputs.beta)[0]))

    np.testing.assert_allclose(gradient(jnp.float32(0.5), *shards), jax.grad(alone)(jnp.float32(0.5)), rtol=1e-4)


def test_too_few_key_heads_are_refused_with_the_numbers():
    inputs = cases.make(B=2, T=70, H=2, HV=8, K=8, V=8, dtype="float32", initial_state=True)
    mesh = mesh_of("explicit")
    partitions = list(specs("data", "tensor"))
    partitions[:2] = [P("data", None, None, None)] * 2
    with pytest.raises(ValueError, match=r"axes \('tensor',\) of size 4 divide.*HV = 8 heads of v, got H = 2"):
        op(*placed(mesh, inputs[:6], partitions))


def test_a_shard_map_over_some_axes_is_refused():
    inputs = cases.make(B=2, T=70, H=4, HV=8, K=8, V=8, dtype="float32")
    mesh = mesh_of("auto")
    some = jax.shard_map(
        lambda *x: jaxqla.gated_delta(*x)[0], mesh=mesh, in_specs=P("data"), out_specs=P("data"), axis_names={"data"}
    )
    with pytest.raises(ValueError, match=r"every mesh axis manual .*got \['tensor'\] left out"):
        jax.jit(some)(*inputs[:5])


def test_kernels_get_local_shapes(monkeypatch):
    monkeypatch.setattr(ops, "_cuda_capabilities", frozenset)
    mesh = mesh_of("explicit")

    def array(dtype, *shape):
        spec = P("data", None, "tensor", *[None] * (len(shape) - 3))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    tokens = [array(jnp.bfloat16, 4, 70, heads, 128) for heads in (4, 4, 8)]
    gates = [array(jnp.float32, 4, 70, 8)] * 2
    call = jax.jit(lambda *x: jaxqla.gated_delta(*x, implementation="cuda")[0])
    text = call.trace(*tokens, *gates).lower(lowering_platforms=("cuda",)).as_text()
    launches = [line for line in text.splitlines() if "@jaxqla_launch_v1" in line]
    assert len(launches) == 2
    assert "(tensor<140x1x128xbf16>, tensor<140x2xf32>" in launches[0]
