"""The op on eight devices: split by rows and heads with no collective, equal to one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxqla
from jaxqla import ops
from tests import cases
from tests.compiled import collectives
from tests.tolerance import assert_trees_close

NAMES = ("q", "k", "v", "g", "beta", "initial_state")
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
CONTEXTS = {
    "auto": (AUTO, AUTO),
    "explicit": (EXPLICIT, EXPLICIT),
    "mixed": (AUTO, EXPLICIT),
    "shard_map": (AUTO, AUTO),
}
SEGMENTS = np.repeat([[1, 2], [3, 0], [4, 4], [0, 5]], 35, axis=1)


def op(q, k, v, g, beta, initial_state, segment_ids=None, cu_seqlens=None):
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
    )


def loss(*arrays):
    return sum(jnp.sum(jnp.sin(x)) for x in op(*arrays))


def specs(rows, heads):
    tokens = P(rows, None, heads, None)
    return (tokens, tokens, tokens, P(rows, None, heads), P(rows, None, heads), P(rows, heads, None, None))


def mesh_of(context, shape=(2, 4)):
    return jax.make_mesh(shape, ("data", "tensor"), axis_types=CONTEXTS[context])


def placed(mesh, arrays, partitions):
    return [
        jax.device_put(np.asarray(x), NamedSharding(mesh, spec)) for x, spec in zip(arrays, partitions, strict=True)
    ]


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize(("H", "HV", "packed"), [(4, 8, True), (8, 8, False)])
def test_rows_and_heads(context, H, HV, packed):
    inputs = cases.make(B=4, T=70, H=H, HV=HV, K=8, V=8, dtype="float32", initial_state=True)
    arrays, partitions = list(inputs[:6]), specs("data", "tensor")
    if packed:
        arrays.append(jnp.asarray(SEGMENTS, jnp.int32))
        partitions = (*partitions, P("data", None))
    mesh = mesh_of(context)
    shards = placed(mesh, arrays, partitions)
    forward, total = op, loss
    if context == "shard_map":
        forward = jax.shard_map(op, mesh=mesh, in_specs=partitions, out_specs=(partitions[2], partitions[5]))

        def total(*arrays):
            return sum(jnp.sum(jnp.sin(x)) for x in forward(*arrays))

    gradients = jax.jit(jax.grad(total, argnums=range(6)))
    assert collectives(jax.jit(forward), *shards) == {}
    assert collectives(gradients, *shards) == {}
    o, state = jax.jit(forward)(*shards)
    assert o.sharding.is_equivalent_to(NamedSharding(mesh, partitions[2]), 4)
    assert_trees_close((o, state), op(*arrays))
    assert_trees_close(gradients(*shards), jax.grad(loss, argnums=range(6))(*arrays))


def test_one_key_head_on_rows():
    inputs = cases.make(B=8, T=70, H=1, HV=4, K=8, V=8, dtype="float32", initial_state=True)
    mesh = mesh_of("auto", (8, 1))
    shards = placed(mesh, inputs[:6], specs("data", None))
    assert collectives(jax.jit(op), *shards) == {}
    assert_trees_close(jax.jit(op)(*shards), op(*inputs[:6]))


@pytest.mark.parametrize("context", ["auto", "explicit"])
def test_packed_sequences_are_split_by_heads(context):
    inputs = cases.make(B=1, T=90, H=4, HV=8, K=8, V=8, dtype="float32", initial_state=True, cu_seqlens=[0, 20, 20, 85])
    mesh = mesh_of(context)
    partitions = specs(None, "tensor")
    shards = placed(mesh, [*inputs[:6], inputs.cu_seqlens], [*partitions, P(None)])
    shards.insert(6, None)
    assert collectives(jax.jit(op), *shards) == {}
    assert_trees_close(jax.jit(op)(*shards), op(*inputs))


def test_arrays_of_one_device_where_a_mesh_is_set():
    inputs = cases.make(B=2, T=70, H=2, HV=4, K=8, V=6, dtype="float32", initial_state=True)
    expected = op(*inputs[:6])
    with jax.set_mesh(mesh_of("auto")):
        assert_trees_close(op(*inputs[:6]), expected)


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
