"""Is the public op right, with every option, dtype, size and layout? The numbers of each path are judged elsewhere."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxqla
from jaxqla import reference

FLOATS = ("q", "k", "v", "g", "beta", "initial_state")
SIZES = {"B": 2, "T": 67, "H": 3, "HV": 6, "K": 5, "V": 4}


def inputs(dtype=jnp.float32, *, packing=None, state=True, seed=0, **sizes):
    """Random arguments: `packing` is None, "segment_ids" or "cu_seqlens", the latter with 3 sequences in one row."""
    sizes = SIZES | sizes
    B, T, H, HV, K, V = (sizes[name] for name in ("B", "T", "H", "HV", "K", "V"))
    rng = np.random.default_rng(seed)
    N = B
    extra = {}
    if packing == "cu_seqlens":
        B, N = 1, 3
        extra["cu_seqlens"] = jnp.asarray([0, T // 3, T // 3, max(T - 2, 0)], jnp.int32)
    if packing == "segment_ids":
        ids = np.sort(rng.integers(1, 4, (B, T)), axis=1)
        extra["segment_ids"] = jnp.asarray(np.where(rng.random((B, T)) < 0.2, 0, ids), jnp.int32)
    if state:
        extra["initial_state"] = jnp.asarray(rng.standard_normal((N, HV, K, V)), jnp.float32)

    def normal(*shape):
        return rng.standard_normal(shape)

    return extra | {
        "q": jnp.asarray(normal(B, T, H, K), dtype),
        "k": jnp.asarray(normal(B, T, H, K) / K, dtype),
        "v": jnp.asarray(normal(B, T, HV, V), dtype),
        "g": jnp.asarray(-np.log1p(np.exp(normal(B, T, HV))), jnp.float32),
        "beta": jnp.asarray(1 / (1 + np.exp(-normal(B, T, HV))), jnp.float32),
    }


def loss_of(function, weights, **options):
    """A scalar of every result, with weights of its own for each element."""

    def loss(floats, rest):
        o, final_state = function(**floats, **rest, **options)
        total = jnp.sum(o * weights["o"])
        return total if final_state is None else total + jnp.sum(final_state * weights["final_state"])

    return loss


def split(arguments):
    floats = {name: x for name, x in arguments.items() if name in FLOATS}
    return floats, {name: x for name, x in arguments.items() if name not in FLOATS}


def weights_of(arguments, seed=1):
    rng = np.random.default_rng(seed)
    N = len(arguments["cu_seqlens"]) - 1 if "cu_seqlens" in arguments else len(arguments["q"])
    state = (N, *arguments["v"].shape[2:3], arguments["q"].shape[3], arguments["v"].shape[3])
    return {
        "o": jnp.asarray(rng.standard_normal(arguments["v"].shape), jnp.float32),
        "final_state": jnp.asarray(rng.standard_normal(state), jnp.float32),
    }


def assert_close(got, want, tolerance=2e-5):
    for path, x in jax.tree_util.tree_leaves_with_path(want):
        y = functools.reduce(lambda tree, key: tree[getattr(key, "key", getattr(key, "idx", None))], path, got)
        name = jax.tree_util.keystr(path)
        assert y.shape == x.shape, name
        assert np.isfinite(y).all(), name
        error = np.linalg.norm(np.asarray(y, np.float32) - x) / max(np.linalg.norm(x), 1e-6)
        assert error < tolerance, f"{name}: relative error {error:.1e}"


# -- options -----------------------------------------------------------------------------------------------------------

OPTIONS = list(
    itertools.product(
        (False, True),  # return_final_state
        (False, True),  # qk_l2norm
        (False, True),  # with an initial state
        (None, "segment_ids", "cu_seqlens"),
        (None, 0.3),  # scale
    )
)


@pytest.mark.parametrize(("return_final_state", "qk_l2norm", "state", "packing", "scale"), OPTIONS)
def test_every_combination_of_options_runs(return_final_state, qk_l2norm, state, packing, scale):
    arguments = inputs(packing=packing, state=state, T=3)
    options = {"return_final_state": return_final_state, "qk_l2norm": qk_l2norm, "scale": scale}
    function = functools.partial(jaxqla.gated_delta, **options)
    o, final_state = jax.eval_shape(function, **arguments)
    assert o.shape == arguments["v"].shape
    N = 3 if packing == "cu_seqlens" else 2
    assert (final_state is not None) == return_final_state
    assert not return_final_state or (final_state.shape, final_state.dtype) == ((N, 6, 5, 4), jnp.float32)
    floats, rest = split(arguments)
    grads = jax.eval_shape(jax.grad(loss_of(function, weights_of(arguments))), floats, rest)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), grads) == jax.tree.map(lambda x: (x.shape, x.dtype), floats)
    told = jaxqla.explain(**arguments, **options)
    assert told.path == "xla"


@pytest.mark.parametrize(
    ("packing", "options", "state"),
    [
        (None, {"qk_l2norm": True}, False),
        (None, {"return_final_state": True, "scale": 0.3}, True),
        ("segment_ids", {"return_final_state": True}, True),
        ("cu_seqlens", {"return_final_state": True, "qk_l2norm": True}, True),
        ("cu_seqlens", {}, True),
    ],
)
def test_results_and_every_gradient_match_the_oracle(packing, options, state):
    arguments = inputs(packing=packing, state=state)
    floats, rest = split(arguments)
    weights = weights_of(arguments)

    def results(function):
        value = jax.value_and_grad(lambda f: loss_of(function, weights, **options)(f, rest))
        return jax.jit(lambda f: (function(**f, **rest, **options), value(f)[1]))(floats)

    got, want = results(jaxqla.gated_delta), results(reference.gated_delta)
    assert_close(got, want)
    if not state:
        # The first token has nothing to forget.
        np.testing.assert_allclose(got[1]["g"][:, 0], 0, atol=1e-5)


def test_positions_and_keywords_are_the_same_arguments():
    arguments = inputs(state=False, T=3)
    by_position = jaxqla.gated_delta(*(arguments[name] for name in ("q", "k", "v", "g", "beta")))
    np.testing.assert_array_equal(by_position[0], jaxqla.gated_delta(**arguments)[0])
    assert by_position[1] is None


# -- exact facts -------------------------------------------------------------------------------------------------------


def test_the_first_token_reads_what_it_wrote():
    q = jnp.zeros((1, 1, 1, 16), jnp.bfloat16).at[..., 0].set(1)
    v = jnp.ones((1, 1, 1, 8), jnp.bfloat16)
    g, beta = jnp.zeros((1, 1, 1)), jnp.ones((1, 1, 1))
    for scale, want in ((None, 0.25), (1.0, 1.0), (0.0, 0.0)):
        o, _ = jaxqla.gated_delta(q, q, v, g, beta, scale=scale)
        np.testing.assert_array_equal(np.asarray(o, np.float32), want)


def test_g_is_a_natural_logarithm():
    q = jnp.zeros((1, 3, 1, 4))
    state = jnp.ones((1, 2, 4, 8))
    g = jnp.full((1, 3, 2), np.log(0.5))
    _, final_state = jaxqla.gated_delta(
        q, q, jnp.ones((1, 3, 2, 8)), g, jnp.ones((1, 3, 2)), initial_state=state, return_final_state=True
    )
    np.testing.assert_allclose(final_state, 0.125, rtol=1e-6)


def test_value_heads_read_their_groups_key_head():
    arguments = inputs(state=False)
    grouped, _ = jaxqla.gated_delta(**arguments)
    repeated = {name: jnp.repeat(arguments[name], 2, axis=2) for name in ("q", "k")}
    plain, _ = jaxqla.gated_delta(**(arguments | repeated))
    np.testing.assert_allclose(grouped, plain, rtol=1e-5, atol=1e-6)


def test_no_initial_state_is_a_zero_one():
    arguments = inputs(state=False)
    zero = jnp.zeros((2, 6, 5, 4))
    absent = jaxqla.gated_delta(**arguments, return_final_state=True)
    given = jaxqla.gated_delta(**arguments, return_final_state=True, initial_state=zero)
    jax.tree.map(np.testing.assert_array_equal, absent, given)


def test_a_sequence_does_not_see_its_neighbour():
    for packing, second in (("segment_ids", slice(40, None)), ("cu_seqlens", slice(67 // 3, None))):
        arguments = inputs(packing=packing)
        if packing == "segment_ids":
            arguments["segment_ids"] = jnp.where(jnp.arange(67) < 40, 1, 2)[None].repeat(2, 0).astype(jnp.int32)
        before, _ = jaxqla.gated_delta(**arguments)
        arguments["v"] = arguments["v"].at[:, 0].multiply(100)
        after, _ = jaxqla.gated_delta(**arguments)
        assert (before[:, 0] != after[:, 0]).any()
        np.testing.assert_array_equal(before[:, second], after[:, second])


@pytest.mark.parametrize("packing", ["segment_ids", "cu_seqlens"])
def test_padding_is_zero_whatever_it_holds(packing):
    arguments = inputs(packing=packing)
    if packing == "segment_ids":
        padding = np.asarray(arguments["segment_ids"] == 0)
    else:
        padding = np.arange(67)[None] >= 65
    assert padding.any()
    clean = jaxqla.gated_delta(**arguments, return_final_state=True)
    floats, rest = split(arguments)
    dirty = floats | {name: jnp.where(jnp.asarray(padding)[..., None, None], jnp.nan, floats[name]) for name in "qkv"}
    dirty |= {name: jnp.where(jnp.asarray(padding)[..., None], jnp.nan, floats[name]) for name in ("g", "beta")}
    jax.tree.map(np.testing.assert_array_equal, clean, jaxqla.gated_delta(**dirty, **rest, return_final_state=True))
    grads = jax.jit(jax.grad(loss_of(jaxqla.gated_delta, weights_of(arguments))))(dirty, rest)
    for name in ("q", "k", "v", "g", "beta"):
        assert np.isfinite(grads[name]).all()
        np.testing.assert_array_equal(np.asarray(grads[name])[padding], 0)
    np.testing.assert_array_equal(np.asarray(clean[0])[padding], 0)


def test_rows_do_not_depend_on_each_other():
    arguments = inputs(B=3)
    floats, rest = split(arguments)
    weights = weights_of(arguments)
    grads = jax.grad(loss_of(jaxqla.gated_delta, weights))(floats, rest)
    for row in range(3):
        one = {name: x[row : row + 1] for name, x in floats.items()}
        weight = {name: x[row : row + 1] for name, x in weights.items()}
        alone = jax.grad(loss_of(jaxqla.gated_delta, weight))(one, rest)
        assert_close({name: x[row : row + 1] for name, x in grads.items()}, alone, tolerance=1e-6)


# -- dtypes ------------------------------------------------------------------------------------------------------------

DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gate_dtype", DTYPES)
def test_dtypes_of_results_and_gradients(dtype, gate_dtype):
    arguments = inputs(dtype, T=3)
    arguments |= {"g": arguments["g"].astype(gate_dtype), "beta": arguments["beta"].astype(gate_dtype)}
    for qk_l2norm in (False, True):
        function = functools.partial(jaxqla.gated_delta, return_final_state=True, qk_l2norm=qk_l2norm)
        o, final_state = jax.eval_shape(function, **arguments)
        assert (o.dtype, final_state.dtype) == (dtype, jnp.float32)
        grads = jax.eval_shape(jax.grad(loss_of(function, weights_of(arguments))), arguments, {})
        assert {name: x.dtype for name, x in grads.items()} == {name: x.dtype for name, x in arguments.items()}


def test_gates_are_computed_on_in_float32():
    arguments = inputs(state=False)
    rounded = {name: arguments[name].astype(jnp.bfloat16) for name in ("g", "beta")}
    widened = {name: x.astype(jnp.float32) for name, x in rounded.items()}
    np.testing.assert_array_equal(
        jaxqla.gated_delta(**(arguments | rounded))[0], jaxqla.gated_delta(**(arguments | widened))[0]
    )


def test_dtypes_in_turn_do_not_mix():
    order = [jnp.bfloat16, jnp.float16, jnp.float32, jnp.float16, jnp.bfloat16]
    results = [jaxqla.gated_delta(**inputs(dtype))[0] for dtype in order]
    want = reference.gated_delta(**inputs())[0]
    for dtype, result in zip(order, results, strict=True):
        assert result.dtype == dtype
        assert_close([result], [want], tolerance=2e-2)
    np.testing.assert_array_equal(*(np.asarray(results[i], np.float32) for i in (0, 4)))


def test_x64_changes_nothing_for_arrays_of_the_contract():
    arguments = inputs(packing="cu_seqlens")
    floats, rest = split(arguments)
    loss = loss_of(jaxqla.gated_delta, weights_of(arguments), return_final_state=True)
    want = jax.value_and_grad(loss)(floats, rest)
    with jax.enable_x64(True):
        got = jax.value_and_grad(loss)(floats, rest)
        assert got[0].dtype == jnp.float32
        wide_gates = floats | {name: floats[name].astype(jnp.float64) for name in ("g", "beta")}
        wide = jax.grad(loss)(wide_gates, rest)
        assert (wide["g"].dtype, wide["q"].dtype) == (jnp.float64, jnp.float32)
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_numpy_arrays_are_arrays():
    arguments = inputs(packing="segment_ids")
    o, _ = jaxqla.gated_delta(**jax.tree.map(np.asarray, arguments))
    assert isinstance(o, jax.Array)
    np.testing.assert_array_equal(o, jaxqla.gated_delta(**arguments)[0])


# -- empty sizes -------------------------------------------------------------------------------------------------------

EMPTY = {
    "no tokens": ({"T": 0}, None),
    "no rows": ({"B": 0}, None),
    "no tokens, with segments": ({"T": 0}, "segment_ids"),
    "no rows, with segments": ({"B": 0}, "segment_ids"),
    "no tokens in one row": ({"T": 0}, "cu_seqlens"),
}


@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize(("sizes", "packing"), EMPTY.values(), ids=EMPTY)
def test_empty_calls_hand_the_state_through(sizes, packing, state):
    arguments = inputs(packing=packing, state=state, **sizes)
    o, final_state = jaxqla.gated_delta(**arguments, return_final_state=True)
    assert o.shape == arguments["v"].shape
    want = arguments.get("initial_state", jnp.zeros(final_state.shape))
    np.testing.assert_array_equal(final_state, want)
    floats, rest = split(arguments)
    weights = weights_of(arguments)
    grads = jax.grad(loss_of(jaxqla.gated_delta, weights, return_final_state=True))(floats, rest)
    if state:
        np.testing.assert_array_equal(grads["initial_state"], weights["final_state"])
    unused = jax.grad(loss_of(jaxqla.gated_delta, weights))(floats, rest)
    assert all((x == 0).all() for x in jax.tree.leaves(unused))


def test_no_sequences_is_all_padding():
    arguments = inputs(packing="cu_seqlens") | {
        "cu_seqlens": jnp.zeros(1, jnp.int32),
        "initial_state": jnp.zeros((0, 6, 5, 4)),
    }
    o, final_state = jaxqla.gated_delta(**arguments, return_final_state=True)
    assert final_state.shape == (0, 6, 5, 4)
    np.testing.assert_array_equal(o, jnp.zeros((1, 67, 6, 4)))
    grads = jax.grad(loss_of(jaxqla.gated_delta, weights_of(arguments)))(*split(arguments))
    assert all((x == 0).all() for x in jax.tree.leaves(grads))


def test_an_empty_sequence_hands_its_state_through():
    arguments = inputs(packing="cu_seqlens")
    assert (np.diff(arguments["cu_seqlens"]) == 0).tolist() == [False, True, False]
    _, final_state = jaxqla.gated_delta(**arguments, return_final_state=True)
    np.testing.assert_array_equal(final_state[1], arguments["initial_state"][1])
    weights = weights_of(arguments)
    grads = jax.grad(loss_of(jaxqla.gated_delta, weights, return_final_state=True))(*split(arguments))
    np.testing.assert_array_equal(grads["initial_state"][1], weights["final_state"][1])


# -- compilation, layouts, donation ------------------------------------------------------------------------------------


def test_the_same_shapes_compile_once():
    compiled = []

    def listen(event, duration, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(duration)

    first, second = (inputs(packing="cu_seqlens", seed=seed, T=11) for seed in (0, 1))
    # Other boundaries, the same shapes: values must not enter the program.
    second["cu_seqlens"] = jnp.asarray([0, 1, 5, 11], jnp.int32)
    step = jax.jit(lambda arguments: jaxqla.gated_delta(**arguments, return_final_state=True))
    jax.block_until_ready((step(first), jaxqla.gated_delta(**first)))
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        jax.block_until_ready((step(second), jaxqla.gated_delta(**second)))
        assert compiled == []
        jax.block_until_ready(jax.jit(lambda x: x * 3 + 1)(jnp.float32(2)))
        assert len(compiled) >= 1  # the listener listens
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert step._cache_size() == 1


def test_slices_and_transposes_of_one_packed_array():
    arguments = inputs(state=False, H=6)
    packed = jnp.concatenate([arguments["q"], arguments["k"], arguments["v"]], axis=-1).transpose(3, 0, 2, 1)

    @jax.jit
    def from_packed(packed, g, beta):
        q, k, v = (x.transpose(1, 3, 2, 0) for x in jnp.split(packed, (5, 10)))
        return jaxqla.gated_delta(q, k, v, g.T, beta.T)[0]

    gates = [arguments[name].T for name in ("g", "beta")]
    np.testing.assert_array_equal(from_packed(packed, *gates), jax.jit(jaxqla.gated_delta)(**arguments)[0])
    weight = weights_of(arguments)["o"]
    got = jax.grad(lambda packed: jnp.sum(from_packed(packed, *gates) * weight))(packed)
    want = jax.grad(loss_of(jaxqla.gated_delta, {"o": weight}))(arguments, {})
    joined = jnp.concatenate([want[name] for name in "qkv"], axis=-1).transpose(3, 0, 2, 1)
    np.testing.assert_allclose(got, joined, rtol=1e-5, atol=1e-5)


def test_a_donated_state_is_used_up_and_the_result_is_right():
    arguments = inputs()
    state = arguments.pop("initial_state")
    want = jaxqla.gated_delta(**arguments, initial_state=state, return_final_state=True)
    step = jax.jit(
        lambda state, arguments: jaxqla.gated_delta(**arguments, initial_state=state, return_final_state=True),
        donate_argnums=0,
    )
    given = jnp.array(state)
    got = step(given, arguments)
    assert given.is_deleted()
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_repeats_are_bit_equal():
    arguments = inputs(jnp.bfloat16, packing="segment_ids")
    first = jaxqla.gated_delta(**arguments, return_final_state=True)
    for _ in range(3):
        jax.tree.map(np.testing.assert_array_equal, jaxqla.gated_delta(**arguments, return_final_state=True), first)
