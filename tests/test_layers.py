"""The layers against their formulas, in other frameworks' clothes, and over devices."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxqla.flax import (
    GatedAttention,
    GatedDeltaNet,
    GatedRMSNorm,
    Places,
    RMSNorm,
    SparseMoE,
    attention,
    make_mesh,
    use_mesh,
)
from tests.compiled import collectives
from tests.language_models import FAST, relative

D, H, HV, K, V = 24, 2, 4, 8, 12
SIZES = {"hidden_size": D, "num_key_heads": H, "num_value_heads": HV, "key_head_dim": K, "value_head_dim": V}
IDS = np.array([[0, 1, 1, 1, 2, 2, 0], [3, 3, 0, 0, 3, 4, 4]], np.int32)


def gated_delta_net(**options):
    return GatedDeltaNet(**SIZES | options, rngs=nnx.Rngs(0))


def filled(new, mesh=None):
    """A layer with random parameters, none at its first value; on a mesh, where they belong."""
    graph, state = nnx.split(nnx.eval_shape(new))
    rng = np.random.default_rng(0)
    shardings = None if mesh is None else dict(nnx.to_flat_state(nnx.get_named_sharding(state, mesh)))

    def fill(path, x):
        values = (0.3 * rng.standard_normal(x.shape)).astype(x.dtype)
        return x.replace(jax.device_put(values, shardings and shardings[path].get_value()))

    return nnx.merge(graph, nnx.from_flat_state([(path, fill(path, x)) for path, x in nnx.to_flat_state(state)]))


def names(state):
    """The parameters of a state by their names."""
    return {".".join(map(str, path)): x for path, x in nnx.to_flat_state(state)}


def fast(function):
    return jax.jit(function, compiler_options=FAST)


def rows(*shape, seed=0, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


# -- norms -------------------------------------------------------------------------------------------------------------


def test_norms_are_their_formulas_in_float32():
    x, gate, scale = rows(3, 5, 16), rows(3, 5, 16, seed=1), rows(16, seed=2)
    unit = x / np.sqrt(np.mean(x.astype(np.float64) ** 2, axis=-1, keepdims=True) + 0.01)
    norm = RMSNorm(16, eps=0.01)
    assert relative(norm(x), unit) < 1e-6
    norm.scale[...] = jnp.asarray(scale)
    assert relative(norm(x), unit * (1 + scale)) < 1e-6
    gated = GatedRMSNorm(16, eps=0.01)
    silu = gate / (1 + np.exp(-gate.astype(np.float64)))
    assert relative(gated(x, gate), unit * silu) < 1e-6
    gated.scale[...] = jnp.asarray(scale)
    assert relative(gated(x, gate), unit * scale * silu) < 1e-6
    # Squares of these overflow in float16.
    large = (300 * np.sign(x)).astype(np.float16)
    got = RMSNorm(16)(large)
    assert got.dtype == np.float16
    np.testing.assert_array_equal(got, np.sign(x))


# -- Gated DeltaNet ----------------------------------------------------------------------------------------------------


def test_what_is_float32_in_a_bfloat16_layer():
    layer = filled(lambda: gated_delta_net(dtype=jnp.bfloat16, param_dtype=jnp.bfloat16))
    dtypes = {name: x.dtype for name, x in names(nnx.state(layer)).items()}
    assert {name for name, dtype in dtypes.items() if dtype == jnp.float32} == {"A_log", "dt_bias", "norm.scale"}
    assert {name for name, dtype in dtypes.items() if dtype == jnp.bfloat16} == {
        "conv1d",
        "in_proj_ba.kernel",
        "in_proj_qkvz.kernel",
        "out_proj.kernel",
    }
    state = layer.init_state(3)
    assert (state.conv.dtype, state.recurrent.dtype) == (jnp.bfloat16, jnp.float32)
    y, after = jax.eval_shape(lambda: layer(jnp.zeros((3, 5, D)), state=state, return_state=True))
    assert (y.dtype, after) == (jnp.bfloat16, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state))


def test_a_thousand_small_updates_move_a_bfloat16_layer():
    graph, before = nnx.split(filled(lambda: gated_delta_net(dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)))
    x, target = rows(2, 3, D), rows(2, 3, D, seed=1)
    rule = optax.adam(1e-5)

    def loss(state):
        return jnp.mean(jnp.square(nnx.merge(graph, state)(x).astype(jnp.float32) - target))

    def update(carry, _):
        state, moments = carry
        updates, moments = rule.update(jax.grad(loss)(state), moments, state)
        return (optax.apply_updates(state, updates), moments), None

    def updates(state):
        return jax.lax.scan(update, (state, rule.init(state)), length=1000)[0][0]

    after = fast(updates)(before)
    for name in ("A_log", "dt_bias"):
        moved = np.abs(np.asarray(after[name][...]) - np.asarray(before[name][...]))
        # Each update is about the rate; bfloat16 would have kept nothing of it at most of these numbers.
        assert np.all(moved > 1e-3), (name, moved)
        assert np.all(moved < 1.1e-2), (name, moved)


def test_a_linen_layer_has_the_same_values():
    x = rows(*IDS.shape, D)
    outer = nnx.bridge.to_linen(GatedDeltaNet, **SIZES)
    variables = fast(lambda key: outer.init(key, x, segment_ids=IDS))(jax.random.key(0))
    params = linen.meta.unbox(variables)["params"]
    arrays = {".".join(path): x for path, x in nnx.traversals.flatten_mapping(params).items()}
    graph, state = nnx.split(nnx.eval_shape(gated_delta_net))
    assert {name: x.shape for name, x in arrays.items()} == {name: x.shape for name, x in names(state).items()}
    filled_in = [(path, x.replace(arrays[".".join(path)])) for path, x in nnx.to_flat_state(state)]
    layer = nnx.merge(graph, nnx.from_flat_state(filled_in))
    got = fast(lambda variables: outer.apply(variables, x, segment_ids=IDS))(variables)
    want = fast(lambda layer: layer(x, segment_ids=IDS))(layer)
    np.testing.assert_array_equal(got, want)
    assert np.all(np.asarray(want)[IDS == 0] == 0)
    assert np.all(np.any(np.asarray(want)[IDS != 0] != 0, axis=-1))


def test_heads_over_devices_cost_one_sum():
    sizes = {"num_key_heads": 4, "num_value_heads": 8}
    x, ids = rows(2, 7, D), IDS

    def run(layer, x, ids):
        return layer(x, segment_ids=ids)

    want = fast(run)(filled(lambda: gated_delta_net(**sizes)), x, ids)
    mesh = make_mesh(data=2, tensor=4)
    with use_mesh(mesh, sizes={"gdn_heads": 4}):
        layer = filled(lambda: gated_delta_net(**sizes), mesh)
        parts = {name: x[...].addressable_shards[0].data.shape for name, x in names(nnx.state(layer)).items()}
        assert parts == {
            "A_log": (2,),
            "conv1d": (4, 1, 2 * K + 2 * V),
            "dt_bias": (2,),
            "in_proj_ba.kernel": (D, 1, 4),
            "in_proj_qkvz.kernel": (D, 1, 2 * K + 4 * V),
            "norm.scale": (V,),
            "out_proj.kernel": (2, V, D),
        }
        split = [jax.device_put(y, NamedSharding(mesh, P("data"))) for y in (x, ids)]
        assert collectives(fast(run), layer, *split) == {"all-reduce": 1}
        assert relative(fast(run)(layer, *split), want) < 1e-6


# -- attention ---------------------------------------------------------------------------------------------------------


def test_long_rows_are_taken_in_blocks(monkeypatch):
    layer = filled(lambda: GatedAttention(D, 4, 2, head_dim=8, rotary_dim=4, rngs=nnx.Rngs(0)))
    x = rows(*IDS.shape, D)

    def loss(layer, x):
        y = layer(x, segment_ids=IDS)
        return jnp.sum(jnp.sin(y)), y

    results = []
    for block in (512, 3):
        monkeypatch.setattr(attention, "_QUERY_BLOCK", block)
        results.append(fast(jax.value_and_grad(lambda *xs: loss(*xs), has_aux=True))(layer, x))
    for got, want in zip(*map(jax.tree.leaves, results), strict=True):
        assert relative(got, want) < 1e-5
    assert np.all(np.asarray(results[0][0][1])[IDS == 0] == 0)


def test_places_count_tokens_and_documents():
    places = Places.of(IDS.shape, jnp.asarray(IDS))
    none = np.iinfo(np.int32).max
    np.testing.assert_array_equal(places.slots, [[none, 0, 1, 2, 3, 4, none], [0, 1, none, none, 2, 3, 4]])
    np.testing.assert_array_equal(np.asarray(places.positions)[IDS != 0], [0, 1, 2, 0, 1, 0, 1, 2, 0, 1])


def test_places_of_other_shapes_are_told():
    with pytest.raises(ValueError, match=r"segment_ids must have shape \(B, T\) = \(2, 6\), got \(2, 7\)"):
        Places.of((2, 6), jnp.asarray(IDS))
    with pytest.raises(ValueError, match=r"positions must have shape \(B, T\) = \(2, 7\), got \(7,\)"):
        Places.of((2, 7), jnp.asarray(IDS), jnp.arange(7))


# -- experts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm_topk_prob", [True, False])
def test_experts_are_those_one_by_one(norm_topk_prob):
    layer = filled(lambda: SparseMoE(D, 5, 2, 12, 20, norm_topk_prob=norm_topk_prob, rngs=nnx.Rngs(0)))
    x = rows(3, 4, D)
    weights = {name: np.asarray(leaf[...], np.float64) for name, leaf in names(nnx.state(layer)).items()}

    def swiglu(x, gate, up, down):
        gate = x @ gate
        return gate / (1 + np.exp(-gate)) * (x @ up) @ down

    want = np.zeros(x.shape)
    for i in np.ndindex(*x.shape[:2]):
        p = np.exp(x[i] @ weights["router.kernel"])
        p /= p.sum()
        top = np.argsort(-p)[:2]
        share = p[top].sum() if norm_topk_prob else 1.0
        parts = ("gate_proj", "up_proj", "down_proj")
        for e in top:
            want[i] += p[e] / share * swiglu(x[i], *(weights[part][e] for part in parts))
        shared = swiglu(x[i], *(weights[f"shared_expert.{part}.kernel"] for part in parts))
        want[i] += shared / (1 + np.exp(-x[i] @ weights["shared_expert_gate.kernel"]))
    assert relative(fast(lambda layer: layer(x))(layer), want) < 1e-5


def test_tokens_go_to_experts_where_they_are():
    x, scale = rows(4, 6, D), rows(4, 6, D, seed=1)

    def new():
        return SparseMoE(D, 5, 2, 12, 20, rngs=nnx.Rngs(0))

    def loss(layer, x, scale):
        return jnp.sum(scale * layer(x))

    want = fast(jax.value_and_grad(loss))(filled(new), x, scale)
    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    with use_mesh(mesh):
        layer = filled(new, mesh)
        split = jax.device_put((x, scale), NamedSharding(mesh, P(("data", "fsdp"))))
        run = fast(jax.value_and_grad(loss))
        # Weights are gathered and sums reduced; were tokens to move, they would go all to all, or device to device.
        assert collectives(run, layer, *split).keys() <= {"all-gather", "all-reduce", "reduce-scatter"}
        hlo = run.lower(layer, *split).compile().as_text()
        for got, expected in zip(*map(jax.tree.leaves, (run(layer, *split), want)), strict=True):
            assert relative(got, expected) < 1e-5
    # Of 4 x 6 tokens that go to 2 experts each, a device sorts its own.
    assert re.search(r"s32\[12\]\S* sort|\(s32\[12\]", hlo)
    assert not re.search(r"[sf]32\[48[,\]]", hlo)


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_sizes_that_do_not_fit_are_told_with_their_numbers():
    rngs = nnx.Rngs(0)
    with pytest.raises(
        ValueError, match=r"^GatedDeltaNet: num_value_heads must be a multiple of num_key_heads = 2, got 3"
    ):
        gated_delta_net(num_value_heads=3)
    with pytest.raises(ValueError, match=r"^GatedAttention: num_heads must be a multiple of num_kv_heads = 2, got 3"):
        GatedAttention(D, 3, 2, rngs=rngs)
    for rotary in (3, 12):
        with pytest.raises(ValueError, match=rf"rotary_dim must be even and at most head_dim = 8, got {rotary}"):
            GatedAttention(D, 4, 2, head_dim=8, rotary_dim=rotary, rngs=rngs)
    with pytest.raises(ValueError, match=r"implementation must be one of \('xla', 'cudnn'\), got 'flash'"):
        GatedAttention(D, 4, 2, implementation="flash", rngs=rngs)  # pyright: ignore[reportArgumentType]
    for top in (0, 6):
        with pytest.raises(ValueError, match=rf"num_experts_per_tok must be from 1 to num_experts = 5, got {top}"):
            SparseMoE(D, 5, top, 12, 20, rngs=rngs)


def test_a_state_needs_places():
    layer = filled(lambda: GatedAttention(D, 4, 2, head_dim=8, rotary_dim=4, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match="places must be given where state is, got None"):
        layer(rows(2, 3, D), state=layer.init_state(2, 8))


def test_meshes_that_do_not_fit_are_told_with_their_numbers():
    with pytest.raises(ValueError, match=r"data \* fsdp \* tensor must be at most the number of devices, got data = 3"):
        make_mesh(data=3, tensor=3)
    rule = r"the mesh axes \('tensor',\) must divide the 2 key heads of the gated delta layers, got 4"
    with pytest.raises(ValueError, match=rule), use_mesh(make_mesh(tensor=4), sizes={"gdn_heads": 2}):
        pass
