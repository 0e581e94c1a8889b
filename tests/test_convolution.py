"""Is the convolution right, whole, in pieces, in steps, packed and split? Judged by a loop in NumPy, float64."""

import functools
import itertools
import re

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxqla
from tests.compiled import collectives

FLOATS = ("x", "weight", "bias", "state")
IDS = np.array([[1, 1, 0, 1, 2, 3, 3, 3, 0], [0, 0, 5, 5, 5, 5, 0, 5, 5], [0] * 9, [0, 4, 0, 0, 2, 0, 2, 0, 2]])


def arguments(dtype="float32", *, B=4, T=9, D=5, W=4, N=None, bias=True, state=True, seed=0):
    """Random x, weight, bias and state, of which the last two may be left out."""
    rng = np.random.default_rng(seed)
    x, weight = rng.standard_normal((B, T, D)), rng.standard_normal((W, D))
    rest = {"bias": rng.standard_normal(D), "state": rng.standard_normal((B if N is None else N, W - 1, D))}
    given = {"x": x, "weight": weight} | {name: y for name, y in rest.items() if {"bias": bias, "state": state}[name]}
    return {name: jnp.asarray(y, dtype) for name, y in given.items()}


def cotangents(B=4, T=9, D=5, W=4, N=None):
    rng = np.random.default_rng(1)
    return rng.standard_normal((B, T, D)), rng.standard_normal((B if N is None else N, W - 1, D))


# -- the judge ---------------------------------------------------------------------------------------------------------

# A sequence: its row, its tokens in order, and the indices of the states that enter and leave it, or None.


def whole_rows(B, T):
    return [(row, range(T), row, row) for row in range(B)]


def of_segments(segment_ids):
    for row, ids in enumerate(np.asarray(segment_ids)):
        tokens = np.flatnonzero(ids)
        found = np.split(tokens, 1 + np.flatnonzero(np.diff(ids[tokens])))
        for i, segment in enumerate(found):
            yield row, segment, row if i == 0 else None, row if i == len(found) - 1 else None


def of_boundaries(cu_seqlens):
    return [(0, range(begin, end), n, n) for n, (begin, end) in enumerate(itertools.pairwise(cu_seqlens))]


def of_slots(valid_lengths, indices=None):
    slots = range(len(valid_lengths)) if indices is None else indices
    return [(row, range(n), slot, slot) for row, (n, slot) in enumerate(zip(valid_lengths, slots, strict=True))]


def by_hand(inputs, sequences, dy=None, dstate=None, *, silu=True):
    """Outputs, states and the gradients of what is given, token by token; states that no sequence has stay."""
    x, weight = (np.asarray(inputs[name], np.float64) for name in ("x", "weight"))
    (B, _, D), W = x.shape, len(weight)
    bias = np.asarray(inputs.get("bias", np.zeros(D)), np.float64)
    state = np.asarray(inputs.get("state", np.zeros((B, W - 1, D))), np.float64)
    dy = np.zeros_like(x) if dy is None else dy
    final, dinitial = state.copy(), np.zeros_like(state) if dstate is None else dstate.copy()
    y, dx, dweight, dbias = (np.zeros_like(z) for z in (x, x, weight, bias))
    for row, tokens, entering, leaving in sequences:
        first = np.zeros((W - 1, D)) if entering is None else state[entering]
        window = np.concatenate([first, x[row, tokens]])
        dwindow = np.zeros_like(window)
        for i, t in enumerate(tokens):
            z = np.sum(weight * window[i : i + W], axis=0) + bias
            s = 1 / (1 + np.exp(-z))
            y[row, t] = z * s if silu else z
            dz = dy[row, t] * (s + z * s * (1 - s) if silu else 1)
            dbias += dz
            dweight += dz * window[i : i + W]
            dwindow[i : i + W] += dz * weight
        if leaving is not None:
            final[leaving] = window[len(tokens) :]
            dwindow[len(tokens) :] += 0 if dstate is None else dstate[leaving]
        dx[row, tokens] = dwindow[W - 1 :]
        if entering is not None:
            dinitial[entering] = dwindow[: W - 1]
    gradients = {"x": dx, "weight": dweight, "bias": dbias, "state": dinitial}
    return y, final, {name: gradients[name] for name in inputs}


def results(function, inputs, dy, dstate):
    """Outputs, states and gradients, in one compiled program."""

    def loss(inputs):
        y, state = function(inputs)[:2]
        return jnp.sum(dy * y) + jnp.sum(dstate * state), (y, state)

    gradients, (y, state) = jax.jit(jax.grad(loss, has_aux=True))(inputs)
    return y, state, gradients


def assert_close(got, want, rtol=2e-6):
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(
            np.asarray(x, np.float64), y, rtol=rtol, atol=5 * rtol, err_msg=jax.tree_util.keystr(path)
        )


def call(inputs, silu=True, **options):
    rest = {"initial_state" if name == "state" else name: x for name, x in inputs.items()}
    return jaxqla.causal_conv1d(**rest, activation="silu" if silu else None, return_final_state=True, **options)


def step(inputs, silu=True, **options):
    return jaxqla.causal_conv1d_step(**inputs, activation="silu" if silu else None, **options)


# -- whole rows --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("W", [2, 3, 4])
@pytest.mark.parametrize("T", [1, 2, 3, 5])
def test_rows_shorter_and_longer_than_the_taps(T, W):
    inputs, weights = arguments(T=T, W=W), cotangents(T=T, W=W)
    assert_close(results(call, inputs, *weights), by_hand(inputs, whole_rows(4, T), *weights))


@pytest.mark.parametrize(("bias", "state", "silu"), [(False, False, False), (True, False, True), (False, True, False)])
def test_what_may_be_left_out(bias, state, silu):
    inputs, weights = arguments(bias=bias, state=state), cotangents()
    got = results(functools.partial(call, silu=silu), inputs, *weights)
    assert_close(got, by_hand(inputs, whole_rows(4, 9), *weights, silu=silu))
    assert call(inputs)[0].shape == (4, 9, 5)
    assert jaxqla.causal_conv1d(inputs["x"], inputs["weight"])[1] is None


def test_swish_is_another_name():
    inputs = arguments(bias=False, state=False)
    silu, swish = (jaxqla.causal_conv1d(**inputs, activation=name)[0] for name in ("silu", "swish"))
    np.testing.assert_array_equal(silu, swish)


# -- packed ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("state", "W"), [(True, 4), (False, 3), (True, 2)])
def test_segments(state, W):
    inputs, weights = arguments(state=state, W=W), cotangents(W=W)
    function = functools.partial(call, segment_ids=jnp.asarray(IDS, jnp.int32))
    assert_close(results(function, inputs, *weights), by_hand(inputs, of_segments(IDS), *weights))


# Empty ones at the start, in the middle and at the end; shorter than the taps and longer; padding after the last.
BOUNDARIES = ([0, 0, 1, 3, 3, 6, 12, 12], [0, 14], [0, 2, 4, 14, 14])


@pytest.mark.parametrize("state", [True, False])
@pytest.mark.parametrize("boundaries", BOUNDARIES)
def test_sequences(boundaries, state):
    sizes = {"B": 1, "T": 14, "N": len(boundaries) - 1}
    inputs, weights = arguments(**sizes, state=state), cotangents(**sizes)
    judged = inputs if state else inputs | {"state": np.zeros((sizes["N"], 3, 5))}
    y, final, gradients = by_hand(judged, of_boundaries(boundaries), *weights)
    function = functools.partial(call, cu_seqlens=jnp.asarray(boundaries, jnp.int32))
    assert_close(results(function, inputs, *weights), (y, final, {name: gradients[name] for name in inputs}))


@pytest.mark.parametrize("packing", ["segment_ids", "cu_seqlens"])
def test_padding_is_zero_whatever_it_holds(packing):
    if packing == "segment_ids":
        inputs, weights, sequences = arguments(), cotangents(), list(of_segments(IDS))
        padding, extra = IDS == 0, jnp.asarray(IDS, jnp.int32)
    else:
        sizes = {"B": 1, "T": 14, "N": 7}
        inputs, weights, sequences = arguments(**sizes), cotangents(**sizes), of_boundaries(BOUNDARIES[0])
        padding, extra = np.arange(14)[None] >= 12, jnp.asarray(BOUNDARIES[0], jnp.int32)
    want = by_hand(inputs, sequences, *weights)
    dirty = inputs | {"x": jnp.where(padding[..., None], jnp.nan, inputs["x"])}
    got = results(functools.partial(call, **{packing: extra}), dirty, *weights)
    assert_close(got, want)
    np.testing.assert_array_equal(np.asarray(got[0])[padding], 0)
    np.testing.assert_array_equal(np.asarray(got[2]["x"])[padding], 0)


def test_gradients_of_gradients():
    inputs = arguments(B=2, T=5)
    ids = IDS[[0, 3], :5]
    rng = np.random.default_rng(2)
    dy, dstate = cotangents(B=2, T=5)
    weights, direction = ({name: rng.standard_normal(x.shape) for name, x in inputs.items()} for _ in range(2))

    def total(gradients):
        return sum(jnp.sum(weights[name] * gradients[name]) for name in FLOATS)

    def loss(inputs):
        y, state = call(inputs, segment_ids=jnp.asarray(ids, jnp.int32))
        return jnp.sum(dy * y) + jnp.sum(dstate * state)

    second = jax.jit(jax.grad(lambda inputs: total(jax.grad(loss)(inputs))))(inputs)
    step = 1e-5
    ends = [
        {name: np.asarray(x, np.float64) + sign * step * direction[name] for name, x in inputs.items()}
        for sign in (1, -1)
    ]
    high, low = (
        sum(np.sum(weights[name] * x) for name, x in by_hand(end, of_segments(ids), dy, dstate)[2].items())
        for end in ends
    )
    slope = sum(np.sum(np.asarray(second[name], np.float64) * direction[name]) for name in FLOATS)
    np.testing.assert_allclose(slope, (high - low) / (2 * step), rtol=1e-5)


def test_a_gradient_keeps_the_inputs_alone():
    inputs = arguments(T=40, D=16)
    for options in ({}, {"segment_ids": jnp.asarray(np.repeat(IDS, 5, axis=1)[:, :40], jnp.int32)}):
        _, vjp = jax.vjp(functools.partial(call, **options), inputs)
        kept = sum(x.nbytes for x in jax.tree.leaves(vjp) if jnp.issubdtype(x.dtype, jnp.floating))
        assert kept <= sum(x.nbytes for x in inputs.values())


# -- pieces and steps --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pieces", [(37, 1, 62), (1, 2, 97), (1,) * 100, (16, 68, 16)])
def test_pieces_equal_one_call(pieces):
    inputs = arguments("bfloat16", B=2, T=100)
    y, final = call(inputs)
    by_op = {True: jax.jit(step), False: jax.jit(call)}
    outputs, state, begin = [], inputs["state"], 0
    for T in pieces:
        part, state = by_op[T <= 16](inputs | {"x": inputs["x"][:, begin : begin + T], "state": state})
        outputs.append(part)
        begin += T
    np.testing.assert_array_equal(state, final)
    # Two roundings to bfloat16 of numbers that differ in the last digit of float32.
    np.testing.assert_allclose(
        *(np.asarray(x, np.float32) for x in (jnp.concatenate(outputs, axis=1), y)), rtol=2**-7, atol=1e-6
    )
    assert state.dtype == jnp.bfloat16


STEPS = {
    "one token": ({"T": 1}, None, None),
    "rows": ({"W": 2}, None, None),
    "lengths": ({}, [4, 0, 2, 1], None),
    "lengths outside": ({"W": 3}, [-3, 7, 3, 4], None),
    "pool": ({}, None, [5, -1, 0, 2]),
    "pool and lengths": ({}, [3, 4, 0, 1], [5, -1, 6, -7]),
    "indices outside": ({}, None, [7, 6, 2**31 - 1, -(2**31)]),
}


def slots_of(lengths, indices, T):
    """The sequences of a step; a row that is inactive has no token and no state."""
    lengths = np.clip([T] * 4 if lengths is None else lengths, 0, T)
    slots = range(4) if indices is None else [i if 0 <= i < 7 else None for i in indices]
    return of_slots([n if slot is not None else 0 for n, slot in zip(lengths, slots, strict=True)], slots)


@pytest.mark.parametrize(("sizes", "lengths", "indices"), STEPS.values(), ids=STEPS)
def test_steps(sizes, lengths, indices):
    sizes = {"T": 4, "N": 4 if indices is None else 7} | sizes
    inputs, weights, sequences = arguments(**sizes), cotangents(**sizes), slots_of(lengths, indices, sizes["T"])
    options = {
        name: jnp.asarray(x, jnp.int32)
        for name, x in (("valid_lengths", lengths), ("state_indices", indices))
        if x is not None
    }
    got = results(functools.partial(step, **options), inputs, *weights)
    assert_close(got, by_hand(inputs, sequences, *weights))
    used = [slot for *_, slot in sequences if slot is not None]
    others = np.setdiff1d(np.arange(sizes["N"]), used)
    np.testing.assert_array_equal(got[1][others], inputs["state"][others])


def test_the_state_after_each_token():
    inputs = arguments(T=5)
    lengths = np.array([5, 0, 3, 1])
    _, last, states = step(inputs, valid_lengths=jnp.asarray(lengths, jnp.int32), return_states=True)
    assert states.shape == (4, 5, 3, 5)
    for t in range(5):
        _, want, _ = by_hand(inputs, of_slots(np.minimum(lengths, t + 1)))
        np.testing.assert_array_equal(states[:, t], want.astype(np.float32))
    np.testing.assert_array_equal(last, states[:, -1])


def test_what_is_inactive_may_hold_anything():
    # Row 0 is inactive, row 1 has no token, row 2 has one; so are their inputs and the slots that no token reads.
    lengths, indices = [4, 0, 1, 4], [-1, 1, 2, 3]
    inputs, weights = arguments(T=4, N=7), cotangents(T=4, N=7)
    dirty = inputs | {
        "x": inputs["x"].at[:2].set(jnp.nan).at[2, 1:].set(jnp.nan),
        "state": inputs["state"].at[:2].set(jnp.nan).at[4:].set(jnp.nan),
    }
    function = functools.partial(
        step, valid_lengths=jnp.asarray(lengths, jnp.int32), state_indices=jnp.asarray(indices, jnp.int32)
    )

    def finite(inputs):
        y, state = function(inputs)
        return y, jnp.nan_to_num(state)

    got = results(finite, dirty, *weights)
    clean = by_hand(inputs, slots_of(lengths, indices, 4), *weights)
    np.testing.assert_array_equal(got[0][:2], 0)
    np.testing.assert_array_equal(got[0][2, 1:], 0)
    np.testing.assert_allclose(got[0], clean[0], rtol=2e-6, atol=1e-5)
    for name in ("x", "weight", "bias"):
        np.testing.assert_allclose(got[2][name], clean[2][name], rtol=2e-6, atol=1e-5, err_msg=name)


def test_tokens_that_are_taken_back():
    # Four tokens are looked at, some are accepted, and the rows go on from the state after those.
    inputs = arguments(B=5, T=6)
    accepted = np.arange(5)
    *_, states = step(inputs | {"x": inputs["x"][:, :4]}, return_states=True)
    states = jnp.concatenate([inputs["state"][:, None], states], axis=1)
    state = jnp.take_along_axis(states, accepted[:, None, None, None], axis=1)[:, 0]
    _, state = step(inputs | {"x": inputs["x"][:, 4:], "state": state})
    for row, n in enumerate(accepted):
        sequential = by_hand(inputs, [(row, [*range(n), 4, 5], row, row)])[1]
        np.testing.assert_array_equal(state[row], sequential[row].astype(np.float32))


def test_a_large_pool():
    inputs = arguments("bfloat16", T=2, N=4200)
    indices = [0, 4095, 4096, 4199]
    _, pool = step(inputs, state_indices=jnp.asarray(indices, jnp.int32))
    want = by_hand(inputs, of_slots([2] * 4, indices))[1]
    np.testing.assert_array_equal(np.asarray(pool, np.float64), want)


def test_a_donated_state_is_written_in_place():
    one = jax.jit(lambda state, inputs, **options: step(inputs | {"state": state}, **options), donate_argnames="state")
    for N, options in ((4, {}), (400, {"state_indices": jnp.asarray([399, -1, 0, 7], jnp.int32)})):
        inputs = arguments(T=1, D=64, N=N)
        want = step(inputs, **options)
        state = inputs.pop("state")
        memory = one.lower(state, inputs, **options).compile().memory_analysis()
        assert memory.alias_size_in_bytes == state.nbytes
        assert N == 4 or memory.temp_size_in_bytes < state.nbytes / 10
        got = one(state, inputs, **options)
        assert state.is_deleted()
        np.testing.assert_array_equal(got[1], want[1])
        np.testing.assert_allclose(got[0], want[0], rtol=2e-6, atol=1e-6)


# -- dtypes and sizes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("function", [call, step])
def test_results_are_rounded_once(dtype, function):
    inputs = arguments(dtype)
    y, state = function(inputs)
    want, final, _ = by_hand(inputs, whole_rows(4, 9))
    assert y.dtype == state.dtype == dtype
    np.testing.assert_array_equal(np.asarray(state, np.float64), final)
    eps = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(np.asarray(y, np.float64), want, rtol=0.51 * eps, atol=1e-6)


def test_dtypes_of_results_and_gradients():
    weight, bias = jnp.ones((4, 5), jnp.float32), jnp.ones(5, jnp.float16)
    for x64 in (False, True):
        with jax.enable_x64(x64):
            for function in (call, step):
                inputs = arguments("bfloat16") | {"weight": weight, "bias": bias}
                y, state = jax.eval_shape(function, inputs)
                assert (y.dtype, state.dtype) == (jnp.bfloat16, jnp.bfloat16)
                gradients = jax.eval_shape(jax.grad(lambda x, f=function: jnp.sum(f(x)[0].astype("float32"))), inputs)
                assert jax.tree.map(lambda x: x.dtype, gradients) == jax.tree.map(lambda x: x.dtype, inputs)


def test_64_bit_mode_changes_nothing():
    inputs = arguments()
    function = jax.jit(lambda x: (call(x, segment_ids=jnp.asarray(IDS, "int32")), step(x, return_states=True)))
    narrow = function(inputs)
    with jax.enable_x64(True):
        wide = function(inputs)
    for x, y in zip(jax.tree.leaves(narrow), jax.tree.leaves(wide), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("state", [False, True])
def test_empty_calls_hand_the_state_through(state):
    for sizes, options in (
        ({"T": 0}, {}),
        ({"B": 0}, {}),
        ({"D": 0}, {}),
        ({"T": 0}, {"segment_ids": jnp.zeros((4, 0), jnp.int32)}),
        ({"B": 1, "T": 0, "N": 2}, {"cu_seqlens": jnp.zeros(3, jnp.int32)}),
        ({"B": 1, "N": 0}, {"cu_seqlens": jnp.zeros(1, jnp.int32)}),
    ):
        inputs = arguments(**sizes, state=state)
        y, final = call(inputs, **options)
        assert y.shape == inputs["x"].shape
        np.testing.assert_array_equal(y, 0)
        np.testing.assert_array_equal(final, inputs["state"] if state else np.zeros(final.shape))
    assert step(arguments(B=0, T=2))[0].shape == (0, 2, 5)
    inputs = arguments(B=0, T=2, N=3)
    np.testing.assert_array_equal(step(inputs, state_indices=jnp.zeros(0, jnp.int32))[1], inputs["state"])


# -- transformations ---------------------------------------------------------------------------------------------------


def test_slices_and_transposes_of_one_packed_array():
    packed = jnp.asarray(np.random.default_rng(3).standard_normal((7, 4, 3, 9)), jnp.float32)
    inputs, weights = arguments(), cotangents()
    ids = jnp.asarray(IDS, jnp.int32)

    def from_packed(packed):
        return call(inputs | {"x": packed[1:6, :, 1].transpose(1, 2, 0)}, segment_ids=ids)

    _, _, got = results(from_packed, packed, *weights)
    x = jnp.array(packed[1:6, :, 1].transpose(1, 2, 0))
    want = by_hand(inputs | {"x": x}, of_segments(IDS), *weights)[2]["x"]
    np.testing.assert_allclose(got[1:6, :, 1].transpose(1, 2, 0), want, rtol=2e-6, atol=1e-5)
    assert not np.asarray(got.at[1:6, :, 1].set(0)).any()


def test_mapped_calls_are_calls_one_by_one():
    ids = jnp.asarray(np.stack([IDS, IDS[::-1]]), jnp.int32)
    boundaries = jnp.asarray([[0, 2, 9], [0, 7, 8]], jnp.int32)
    several = [arguments(seed=seed) for seed in range(2)]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *several)
    packed = jax.tree.map(lambda x: x[:, :1], stacked | {"weight": stacked["weight"][:, None]})
    packed |= {"weight": stacked["weight"], "bias": stacked["bias"], "state": stacked["state"][:, :2]}

    def gradient(function):
        return lambda inputs, *rest: results(lambda x: function(x, *rest), inputs, 1.0, 1.0)

    for function, arrays in (
        (lambda x, i: call(x, segment_ids=i), (stacked, ids)),
        (lambda x, i: call(x, cu_seqlens=i), (packed, boundaries)),
        (lambda x, i: step(x, state_indices=i), (stacked, jnp.asarray([[3, 0, -1, 1], [-1, -1, 2, 0]], jnp.int32))),
    ):
        got = jax.jit(jax.vmap(gradient(function)))(*arrays)
        for i in range(2):
            want = gradient(function)(*jax.tree.map(lambda x, i=i: x[i], arrays))
            assert_close(jax.tree.map(lambda x, i=i: x[i], got), jax.tree.map(np.asarray, want))
    # A state that is not mapped, rows that are.
    shared = {name: None if name == "state" else 0 for name in stacked}
    inputs = stacked | {"state": several[0]["state"]}
    got = jax.vmap(lambda x: step(x, state_indices=jnp.asarray([3, 0, -1, 1], "int32")), in_axes=(shared,))(inputs)
    for i in range(2):
        want = step(several[i] | {"state": several[0]["state"]}, state_indices=jnp.asarray([3, 0, -1, 1], jnp.int32))
        assert_close(jax.tree.map(lambda x, i=i: x[i], got), jax.tree.map(np.asarray, want))


def test_a_scan_of_steps():
    inputs = arguments(T=12)

    def token(state, x):
        y, state = step(inputs | {"x": x[:, None], "state": state})
        return state, y[:, 0]

    state, y = jax.lax.scan(token, inputs["state"], inputs["x"].swapaxes(0, 1))
    want, final, _ = by_hand(inputs, whole_rows(4, 12))
    np.testing.assert_array_equal(state, final.astype(np.float32))
    np.testing.assert_allclose(y.swapaxes(0, 1), want, rtol=2e-6, atol=1e-5)


def test_values_do_not_enter_the_program():
    function = jax.jit(lambda inputs, i: call(inputs, cu_seqlens=i))
    for boundaries in BOUNDARIES[::2]:
        inputs = arguments(B=1, T=14, N=4)
        boundaries = [*boundaries, *[boundaries[-1]] * 8][:5]
        y, final = function(inputs, jnp.asarray(boundaries, jnp.int32))
        assert_close((y, final), by_hand(inputs, of_boundaries(boundaries))[:2])
    assert function._cache_size() == 1


def test_exported_programs():
    inputs = arguments(T=3)

    def both(inputs, ids, slots):
        return call(inputs, segment_ids=ids), step(inputs, state_indices=slots)

    arrays = (inputs, jnp.asarray(IDS[:, :3], jnp.int32), jnp.asarray([2, -1, 0, 1], jnp.int32))
    exported = jax.export.deserialize(jax.export.export(jax.jit(both), platforms=("cpu", "cuda"))(*arrays).serialize())
    got, want = exported.call(*arrays), jax.jit(both)(*arrays)
    jax.tree.map(np.testing.assert_array_equal, got, want)


# -- several devices ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("T", "W"), [(1, 4), (2, 4), (3, 4), (1, 2), (2, 3)])
def test_tokens_are_split_over_devices(T, W):
    # Segments that cross devices, with whole devices of padding, one of each row within its first tokens.
    rng = np.random.default_rng(4)
    ids = np.sort(rng.integers(1, 5, (4, 8 * T)), axis=1) * (rng.random((4, 8 * T)) < 0.7)
    ids[1, T : 4 * T] = 0
    ids[2, : 2 * T] = 0
    ids[3] = 6
    inputs, weights = arguments(T=8 * T, W=W), cotangents(T=8 * T, W=W)
    mesh = jax.make_mesh((8,), ("context",), axis_types=(AxisType.Auto,))
    tokens = P(None, "context")
    specs = {"x": tokens, "weight": P(), "bias": P(), "state": P()}
    piece = functools.partial(call, sequence_axis="context")
    plain = jax.shard_map(piece, mesh=mesh, in_specs=(specs,), out_specs=(tokens, P()))
    packed = jax.shard_map(
        lambda inputs, ids: piece(inputs, segment_ids=ids),
        mesh=mesh,
        in_specs=(specs, tokens),
        out_specs=(tokens, P()),
    )
    for function, sequences in (
        (plain, whole_rows(4, 8 * T)),
        (lambda inputs: packed(inputs, jnp.asarray(ids, jnp.int32)), of_segments(ids)),
    ):
        assert_close(results(function, inputs, *weights), by_hand(inputs, sequences, *weights))


def test_split_tokens_without_a_state_or_without_tokens():
    mesh = jax.make_mesh((8,), ("context",), axis_types=(AxisType.Auto,))
    tokens = P(None, "context")

    def piece(x, weight, ids=None):
        return jaxqla.causal_conv1d(x, weight, segment_ids=ids, return_final_state=True, sequence_axis="context")

    for T in (0, 16):
        inputs = arguments(T=T, bias=False, state=False)
        ids = np.resize(IDS, (4, T))
        for rest, sequences in (((), whole_rows(4, T)), ((jnp.asarray(ids, jnp.int32),), of_segments(ids))):
            specs = (tokens, P(), *[tokens] * len(rest))
            function = jax.shard_map(piece, mesh=mesh, in_specs=specs, out_specs=(tokens, P()))
            got = jax.jit(function)(*inputs.values(), *rest)
            assert_close(got, by_hand(inputs, sequences, silu=False)[:2])


CONTEXTS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit, "shard_map": AxisType.Auto}


@pytest.mark.parametrize("context", CONTEXTS)
def test_rows_and_channels_are_split_with_no_collective_but_one_sum_of_gradients(context):
    inputs, weights = arguments(D=8), cotangents(D=8)
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(CONTEXTS[context],) * 2)
    rows = P("data", None, "tensor")
    specs = {"x": rows, "weight": P(None, "tensor"), "bias": P("tensor"), "state": rows}

    def place(x, spec):
        return jax.device_put(np.asarray(x), NamedSharding(mesh, spec))

    shards = {name: place(x, specs[name]) for name, x in inputs.items()}
    lengths = np.array([9, 0, 2, 5], np.int32)
    for name, function, values, sequences in (
        ("segment_ids", call, IDS.astype(np.int32), of_segments(IDS)),
        ("valid_lengths", step, lengths, of_slots(lengths)),
    ):

        def run(inputs, values, name=name, function=function):
            def local(inputs, values):
                return function(inputs, **{name: values})

            if context == "shard_map":
                local = jax.shard_map(local, mesh=mesh, in_specs=(specs, P("data")), out_specs=(rows, rows))
            return local(inputs, values)

        placed = place(values, P("data"))
        assert collectives(jax.jit(run), shards, placed) == {}
        dy, dstate = (place(x.astype(np.float32), rows) for x in weights)

        def loss(inputs, values, dy, dstate, run=run):
            y, state = run(inputs, values)
            return jnp.sum(dy * y) + jnp.sum(dstate * state)

        gradient = jax.jit(jax.grad(loss))
        assert collectives(gradient, shards, placed, dy, dstate) == {"all-reduce": 1}
        assert_close(gradient(shards, placed, dy, dstate), by_hand(inputs, sequences, *weights)[2])


def test_a_state_may_be_the_same_on_devices_whose_segments_differ():
    inputs = arguments(state=False)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))

    def local(inputs, ids):
        return call(inputs | {"state": jnp.zeros((1, 3, 5))}, segment_ids=ids)

    specs = {"x": P("data"), "weight": P(), "bias": P()}
    split = jax.shard_map(local, mesh=mesh, in_specs=(specs, P("data")), out_specs=P("data"))
    weights = cotangents()
    got = results(lambda inputs: split(inputs, jnp.asarray(IDS, jnp.int32)), inputs, *weights)
    assert_close(got, by_hand(inputs, of_segments(IDS), *weights))


# -- wrong arguments ---------------------------------------------------------------------------------------------------

f32, i32 = (functools.partial(jnp.ones, dtype=dtype) for dtype in ("float32", "int32"))
# What is changed, whether that is for the step, and the message after the function's name.
WRONG_VALUES = {
    "x rank": ({"x": f32((4, 9))}, None, "x must have 3 dimensions (B, T, D), got shape (4, 9)"),
    "weight layout": ({"weight": f32((5, 4))}, None, "weight must have shape (W, D) with D = 5, got (5, 4)"),
    "weight rank": ({"weight": f32((4, 1, 5))}, None, "weight must have shape (W, D) with D = 5, got (4, 1, 5)"),
    "one tap": ({"weight": f32((1, 5))}, None, "weight must have W = 2 to 4 taps, got W = 1"),
    "many taps": ({"weight": f32((5, 5))}, None, "weight must have W = 2 to 4 taps, got W = 5"),
    "bias": ({"bias": f32((4,))}, None, "bias must have shape (D) = (5,), got (4,)"),
    "activation": ({"activation": "gelu"}, None, "activation must be None, 'silu' or 'swish', got 'gelu'"),
    "implementation": (
        {"implementation": "cuda"},
        None,
        "implementation must be None or 'xla', as it has no kernels, got 'cuda'",
    ),
    "initial_state": (
        {"initial_state": f32((4, 4, 5))},
        False,
        "initial_state must have shape (N, W-1, D) = (4, 3, 5), got (4, 4, 5)",
    ),
    "segment_ids": ({"segment_ids": i32((4, 8))}, False, "segment_ids must have shape (B, T) = (4, 9), got (4, 8)"),
    "cu_seqlens rows": ({"cu_seqlens": i32((3,))}, False, "x must have B = 1 row where cu_seqlens is given, got B = 4"),
    "two packings": (
        {"cu_seqlens": i32((3,)), "segment_ids": i32((4, 9))},
        False,
        "cu_seqlens must be None where segment_ids is given, got both",
    ),
    "sequence_axis": (
        {"sequence_axis": "context"},
        False,
        "sequence_axis must name a manual mesh axis of the shard_map it is called in (manual: []), got 'context'",
    ),
    "many tokens": (
        {"x": f32((4, 17, 5))},
        True,
        "x must have T = 1 to 16 tokens (causal_conv1d takes any number), got T = 17",
    ),
    "no tokens": (
        {"x": f32((4, 0, 5))},
        True,
        "x must have T = 1 to 16 tokens (causal_conv1d takes any number), got T = 0",
    ),
    "state": ({"state": f32((3, 3, 5))}, True, "state must have shape (B, W-1, D) = (4, 3, 5), got (3, 3, 5)"),
    "pool": (
        {"state": f32((7, 2, 5)), "state_indices": i32((4,))},
        True,
        "state must have shape (P, W-1, D) = (P, 3, 5) with P >= 1 slots where state_indices is given, got (7, 2, 5)",
    ),
    "empty pool": (
        {"state": f32((0, 3, 5)), "state_indices": i32((4,))},
        True,
        "state must have shape (P, W-1, D) = (P, 3, 5) with P >= 1 slots where state_indices is given, got (0, 3, 5)",
    ),
    "state_indices": ({"state_indices": i32((3,))}, True, "state_indices must have shape (B) = (4,), got (3,)"),
    "valid_lengths": ({"valid_lengths": i32((4, 1))}, True, "valid_lengths must have shape (B) = (4,), got (4, 1)"),
}
WRONG_TYPES = {
    "list": ({"weight": [[1.0]]}, None, "weight must be an array, got list"),
    "number": ({"bias": 0.0}, None, "bias must be an array or None, got float"),
    "x dtype": ({"x": i32((4, 9, 5))}, None, "x must have dtype bfloat16, float16 or float32, got int32"),
    "weight dtype": ({"weight": i32((4, 5))}, None, "weight must have a floating dtype, got int32"),
    "initial_state dtype": (
        {"initial_state": f32((4, 3, 5)).astype("bfloat16")},
        False,
        "initial_state must have the dtype of x = float32, got bfloat16",
    ),
    "flag": (
        {"return_final_state": 1},
        False,
        "return_final_state must be True or False, a Python value, got int",
    ),
    "segment_ids dtype": ({"segment_ids": f32((4, 9))}, False, "segment_ids must have dtype int32, got float32"),
    "no state": ({"state": None}, True, "state must be an array, got None"),
    "state dtype": (
        {"state": f32((4, 3, 5)).astype("bfloat16")},
        True,
        "state must have the dtype of x = float32, got bfloat16",
    ),
    "state_indices dtype": (
        {"state_indices": f32((4,))},
        True,
        "state_indices must have dtype int32, got float32",
    ),
    "step flag": ({"return_states": None}, True, "return_states must be True or False, a Python value, got None"),
}


@pytest.mark.parametrize(
    ("changes", "of_step", "text", "error"),
    [(*case, ValueError) for case in WRONG_VALUES.values()] + [(*case, TypeError) for case in WRONG_TYPES.values()],
    ids=[*WRONG_VALUES, *WRONG_TYPES],
)
def test_wrong_arguments_are_named(changes, of_step, text, error):
    right = {"x": f32((4, 9, 5)), "weight": f32((4, 5))}
    if of_step is not True:
        with pytest.raises(error, match=f"^causal_conv1d: {re.escape(text)}$"):
            jaxqla.causal_conv1d(**(right | changes))
    if of_step is not False:
        with pytest.raises(error, match=f"^causal_conv1d_step: {re.escape(text)}$"):
            jaxqla.causal_conv1d_step(**({"state": f32((4, 3, 5))} | right | changes))
