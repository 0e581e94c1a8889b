"""The decoding step, against the recurrence of the docstring in float64, one token at a time in NumPy."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxqla

B, T, H, HV, K, V, P = 4, 5, 2, 4, 16, 8, 6


def arguments(T: int = T, dtype: Any = "float32", state_dtype: Any = "float32", states: int = B, seed: int = 0):
    rng = np.random.default_rng(seed)

    def unit(x):
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    arrays = {
        "q": jnp.asarray(unit(rng.standard_normal((B, T, H, K))), dtype),
        "k": jnp.asarray(unit(rng.standard_normal((B, T, H, K))), dtype),
        "v": jnp.asarray(rng.standard_normal((B, T, HV, V)), dtype),
        "g": jnp.asarray(-np.exp(rng.standard_normal((B, T, HV))), jnp.float32),
        "beta": jnp.asarray(rng.uniform(size=(B, T, HV)), jnp.float32),
    }
    return arrays | {"state": jnp.asarray(rng.standard_normal((states, HV, K, V)), state_dtype)}


def by_hand(arrays, *, lengths=None, indices=None, scale=K**-0.5, l2norm=False):
    """Outputs, the new states or pool, and the state of each row after each token."""
    q, k, v, g, beta, pool = (np.asarray(arrays[name], np.float64) for name in ("q", "k", "v", "g", "beta", "state"))
    rows, tokens = v.shape[:2]
    if l2norm:
        q, k = (x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + 1e-6) for x in (q, k))
    o, after, pool = np.zeros(v.shape), np.zeros((rows, tokens, *pool.shape[1:])), pool.copy()
    for b in range(rows):
        place = b if indices is None else indices[b]
        if not 0 <= place < len(pool):
            continue
        for t in range(tokens):
            if lengths is None or t < lengths[b]:
                for h in range(v.shape[2]):
                    key = h // (v.shape[2] // q.shape[2])
                    S = np.exp(g[b, t, h]) * pool[place, h]
                    u = beta[b, t, h] * (v[b, t, h] - S.T @ k[b, t, key])
                    S = S + np.outer(k[b, t, key], u)
                    o[b, t, h] = scale * S.T @ q[b, t, key]
                    pool[place, h] = S
            after[b, t] = pool[place]
    return o, pool, after


def close(actual, expected, tolerance=2e-5):
    for x, y in zip(actual, expected, strict=True):
        np.testing.assert_allclose(np.asarray(x, np.float64), y, rtol=tolerance, atol=tolerance)


@functools.partial(jax.jit, static_argnames=("scale", "qk_l2norm", "return_states"))
def step(arrays, **options):
    return jaxqla.gated_delta_step(**arrays, **options)


@pytest.mark.parametrize("T", [1, 2, 5, 16])
def test_numbers_of_tokens(T):
    arrays = arguments(T)
    close(step(arrays, return_states=True), by_hand(arrays))


def test_scale_and_l2norm():
    arrays = arguments()
    arrays["q"], arrays["k"] = arrays["q"] * 3, arrays["k"].at[0, 0].set(0)
    close(step(arrays, scale=-0.3, qk_l2norm=True)[:2], by_hand(arrays, scale=-0.3, l2norm=True)[:2])


INDICES, LENGTHS = (5, -1, 0, 7), (5, 3, 2, 5)


def test_a_pool_is_changed_where_rows_point_and_nowhere_else():
    arrays = arguments(states=P)
    indices, lengths = jnp.asarray(INDICES, jnp.int32), jnp.asarray(LENGTHS, jnp.int32)
    o, pool, _ = step(arrays, state_indices=indices, valid_lengths=lengths, return_states=True)
    expected = by_hand(arrays, indices=INDICES, lengths=LENGTHS)
    close((o, pool), expected[:2])
    assert not np.asarray(o)[[1, 3]].any()
    np.testing.assert_array_equal(pool[1:5], arrays["state"][1:5])


def test_nothing_is_read_of_what_does_not_count():
    indices, lengths = jnp.asarray(INDICES, jnp.int32), jnp.asarray(LENGTHS, jnp.int32)
    clean = arguments(states=P)
    dirty = {
        name: x if name == "state" else x.at[jnp.array([1, 3])].set(jnp.nan).at[2, 2:].set(jnp.nan)
        for name, x in clean.items()
    }

    def loss(arrays):
        o, pool = step(arrays, state_indices=indices, valid_lengths=lengths)
        return jnp.sum(o**2) + jnp.sum(pool**2)

    for x, y in zip(jax.tree.leaves(jax.grad(loss)(dirty)), jax.tree.leaves(jax.grad(loss)(clean)), strict=True):
        np.testing.assert_array_equal(x, y)


def test_valid_lengths_without_a_pool():
    arrays, lengths = arguments(), (0, 1, 4, 5)
    close(
        step(arrays, valid_lengths=jnp.asarray(lengths, jnp.int32), return_states=True),
        by_hand(arrays, lengths=lengths),
    )


def test_a_bfloat16_state_is_rounded_once_a_call():
    arrays = arguments(dtype="bfloat16", state_dtype="bfloat16")
    o, state = step(arrays)
    expected = by_hand(arrays)
    assert (o.dtype, state.dtype) == (jnp.bfloat16, jnp.bfloat16)
    close((o, state), expected[:2], 2**-8)


def test_a_donated_state_is_changed_in_place():
    arrays = arguments(states=P)
    state = arrays.pop("state")
    indices = jnp.arange(B, dtype=jnp.int32)

    def call(state, arrays):
        return jaxqla.gated_delta_step(**arrays, state=state, state_indices=indices)

    compiled = jax.jit(call, donate_argnums=0).lower(state, arrays).compile()
    assert compiled.memory_analysis().alias_size_in_bytes == state.nbytes


def test_mapped_and_scanned():
    arrays = arguments(T=1)
    stacked = {name: jnp.stack([x, x[::-1]]) for name, x in arrays.items()}
    mapped = jax.vmap(step)(stacked)
    for i in range(2):
        close([x[i] for x in mapped], by_hand({name: x[i] for name, x in stacked.items()})[:2])

    def body(state, _):
        o, state = step(arrays | {"state": state})
        return state, o

    state, o = jax.lax.scan(body, arrays["state"], length=3)
    for i in range(3):
        expected = by_hand(arrays)
        close((o[i],), expected[:1])
        arrays["state"] = expected[1]
    close((state,), (arrays["state"],))


@pytest.mark.parametrize("pieces", [(37, 1, 62), (1, 2, 97), (1,) * 100], ids=["37+1+62", "1+2+97", "100x1"])
def test_prefill_in_pieces_then_decoding_is_one_call(pieces):
    # Convolution, then recurrence, as the layer has them; pieces of at most 16 tokens go through the steps.
    total, D = sum(pieces), 2 * H * K + HV * V
    arrays = arguments(total)
    x = jnp.concatenate([arrays[name].reshape(B, total, -1) for name in ("q", "k", "v")], axis=-1)
    weight = jnp.asarray(np.random.default_rng(4).standard_normal((4, D)), jnp.float32)

    @functools.partial(jax.jit, static_argnames="few")
    def run(x, g, beta, conv_state, state, few):
        if few:
            y, conv_state = jaxqla.causal_conv1d_step(x, weight, state=conv_state, activation="silu")[:2]
        else:
            y, conv_state = jaxqla.causal_conv1d(
                x, weight, activation="silu", initial_state=conv_state, return_final_state=True
            )
        q, k, v = jnp.split(y, [H * K, 2 * H * K], axis=-1)
        q, k, v = (z.reshape(*z.shape[:2], heads, -1) for z, heads in ((q, H), (k, H), (v, HV)))
        if few:
            o, state = jaxqla.gated_delta_step(q, k, v, g, beta, state, qk_l2norm=True)
        else:
            o, state = jaxqla.gated_delta(
                q, k, v, g, beta, initial_state=state, return_final_state=True, qk_l2norm=True
            )
        return o, conv_state, state

    states = jnp.zeros((B, 3, D)), arrays["state"]
    whole = run(x, arrays["g"], arrays["beta"], *states, few=False)
    outputs, first = [], 0
    for size in pieces:
        piece = slice(first, first + size)
        o, *states = run(x[:, piece], arrays["g"][:, piece], arrays["beta"][:, piece], *states, few=size <= 16)
        outputs.append(o)
        first += size
    close((jnp.concatenate(outputs, axis=1), *states), [np.asarray(x, np.float64) for x in whole], 5e-5)


def test_bad_arguments_are_told_with_their_numbers():
    arrays = arguments()
    with pytest.raises(ValueError, match="17"):
        jaxqla.gated_delta_step(**arguments(17))
    with pytest.raises(ValueError, match=r"state.*got.*\(4, 4, 8, 16\)"):
        jaxqla.gated_delta_step(**arrays | {"state": arrays["state"].mT})
    with pytest.raises(TypeError, match="float16"):
        jaxqla.gated_delta_step(**arrays | {"state": arrays["state"].astype(jnp.float16)})
    with pytest.raises(ValueError, match=r"state_indices.*got.*3"):
        jaxqla.gated_delta_step(**arrays, state_indices=jnp.zeros(3, jnp.int32))
    with pytest.raises(TypeError, match=r"valid_lengths.*float32"):
        jaxqla.gated_delta_step(**arrays, valid_lengths=jnp.ones(B))


# -- pools -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_places_past_4096_of_a_large_donated_pool(dtype):
    # Offsets must not overflow, neighbours not change, and the pool not be copied.
    places, slots = np.array([4199, 0, 4096, 4095], np.int32), 4200
    arrays = arguments(T=1, dtype=dtype, state_dtype=dtype, states=slots)
    pool = arrays.pop("state")

    def call(pool, arrays):
        return jaxqla.gated_delta_step(**arrays, state=pool, state_indices=jnp.asarray(places))

    want, small = step(arrays | {"state": pool[places]})
    compiled = jax.jit(call, donate_argnums=0).lower(pool, arrays).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == pool.nbytes
    # XLA writes bfloat16 to places in float32 on CPUs, by way of a copy.
    assert memory.temp_size_in_bytes < pool.nbytes / 10 or dtype == "bfloat16"
    o, after = compiled(jnp.array(pool), arrays)
    np.testing.assert_array_equal(o, want)
    np.testing.assert_array_equal(after[places], small)
    others = np.setdiff1d(np.arange(slots), places)
    np.testing.assert_array_equal(after[others], pool[others])


def test_a_donated_pool_whose_rows_change_places():
    # The places read at one step are written by other rows at the next; as often as not the buffer is the same.
    orders = jnp.asarray(np.random.default_rng(5).permuted(np.tile(np.arange(B), (100, 1)), axis=1), jnp.int32)
    arrays = arguments(T=1, states=B)
    arrays["g"] = arrays["g"] * 0.01

    def call(pool, arrays, indices):
        return jaxqla.gated_delta_step(**arrays, state=pool, state_indices=indices)

    donated, kept = jax.jit(call, donate_argnums=0), jax.jit(call)
    pool = arrays.pop("state")
    mine = jnp.array(pool)
    for indices in orders:
        o, mine = donated(mine, arrays, indices)
        want, pool = kept(pool, arrays, indices)
        np.testing.assert_array_equal(o, want)
    np.testing.assert_array_equal(mine, pool)


def test_unused_places_may_hold_anything():
    indices, lengths = jnp.asarray(INDICES, jnp.int32), jnp.asarray([2, 1, 1, 2], jnp.int32)
    clean = arguments(T=2, states=P)
    used = jnp.asarray([0, 5])
    dirty = clean | {"state": jnp.full_like(clean["state"], jnp.nan).at[used].set(clean["state"][used])}

    def loss(arrays):
        o, pool, states = step(arrays, state_indices=indices, valid_lengths=lengths, return_states=True)
        total = jnp.sum(o**2) + jnp.sum(pool[used] ** 2) + jnp.sum(jnp.sin(states))
        return total, (o, pool, states)

    (_, (o, pool, states)), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(dirty)
    (_, truth), expected = jax.jit(jax.value_and_grad(loss, has_aux=True))(clean)
    # An unused place keeps what it had.
    assert np.isnan(np.asarray(pool)[1:5]).all()
    for x, y in zip(
        jax.tree.leaves(((o, pool[used], states), gradients)),
        jax.tree.leaves(((truth[0], truth[1][used], truth[2]), expected)),
        strict=True,
    ):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("pooled", [False, True])
def test_gradients_by_differences(pooled):
    arrays = arguments(T=2, states=P if pooled else B)
    options, by_hand_options = {}, {}
    if pooled:
        arrays["q"], arrays["k"] = arrays["q"] * 2, arrays["k"] * 0.5
        options = {"scale": 0.7, "qk_l2norm": True}
        by_hand_options = {"scale": 0.7, "l2norm": True}
        indices, lengths = (5, -1, 0, 3), (2, 2, 1, 2)
        options |= {"state_indices": jnp.asarray(indices, jnp.int32), "valid_lengths": jnp.asarray(lengths, jnp.int32)}
        by_hand_options |= {"indices": indices, "lengths": lengths}
    truth = by_hand(arrays, **by_hand_options)
    rng = np.random.default_rng(6)
    weights = [rng.standard_normal(x.shape) for x in truth[:2]]

    def value(results):
        return sum((x * w).sum() for x, w in zip(results[:2], weights, strict=True))

    gradients = jax.jit(jax.grad(lambda arrays: value(jaxqla.gated_delta_step(**arrays, **options))))(arrays)
    for name, gradient in gradients.items():
        direction = rng.standard_normal(gradient.shape)
        ends = []
        for sign in (1e-5, -1e-5):
            moved = {n: np.asarray(x, np.float64) for n, x in arrays.items()}
            moved[name] = moved[name] + sign * direction
            ends.append(value(by_hand(moved, **by_hand_options)))
        slope = (ends[0] - ends[1]) / 2e-5
        np.testing.assert_allclose(np.sum(np.asarray(gradient) * direction), slope, rtol=1e-4, atol=1e-4)


# -- tokens that are taken back ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
def test_any_number_of_drafted_tokens_may_be_taken(state_dtype):
    # Four drafted tokens, of which the rows take 0, 1, 3 and 4; then two more, on from there.
    taken = np.array([0, 1, 3, 4])
    arrays = arguments(T=4, state_dtype=state_dtype)
    more = arguments(T=2, seed=7)
    _, _, states = step(arrays, return_states=True)
    assert states.dtype == arrays["state"].dtype
    after = by_hand(arrays)[2]
    close((states,), (after,), 2**-8 if state_dtype == "bfloat16" else 2e-5)
    before = jnp.concatenate([arrays["state"][:, None], states], axis=1)
    actual = step(more | {"state": before[np.arange(B), taken]})
    after = np.concatenate([np.asarray(arrays["state"], np.float64)[:, None], after], axis=1)
    expected = by_hand(more | {"state": after[np.arange(B), taken]})
    close(actual, expected[:2], 2**-7 if state_dtype == "bfloat16" else 2e-5)


# -- numbers -----------------------------------------------------------------------------------------------------------


def few_heads(arrays):
    """One row with one head."""
    return {name: x[:1, :1] if name == "state" else x[:1, :, :1] for name, x in arrays.items()}


def test_four_thousand_steps_with_a_float32_and_a_bfloat16_state():
    steps = 4096
    arrays = few_heads(arguments(T=steps))
    arrays["g"] = arrays["g"] * 0.01
    truth = by_hand(arrays)[1]
    tokens = {name: jnp.moveaxis(x, 1, 0)[:, :, None] for name, x in arrays.items() if name != "state"}
    error = {}
    for dtype in ("float32", "bfloat16"):

        def one(state, token):
            return jaxqla.gated_delta_step(**token, state=state)[1], None

        state, _ = jax.jit(lambda state, one=one: jax.lax.scan(one, state, tokens))(arrays["state"].astype(dtype))
        assert state.dtype == dtype
        error[dtype] = np.abs(np.asarray(state, np.float64) - truth).max() / np.abs(truth).max()
    # Seen: 2e-7 and 1e-2. Rounding at every step adds up over the memory of the head, and no further.
    assert error["float32"] < 2e-6
    assert 1e-3 < error["bfloat16"] < 3e-2


@pytest.mark.parametrize("residual", [-128.0, -8.0, 8.0])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_small_error_of_a_large_value_is_not_lost(dtype, residual):
    # The state holds v - r for a one-hot key: in bfloat16 numbers near 4096 are 32 apart, and the error would be 0.
    arrays = few_heads(arguments(T=1))
    key = jnp.zeros((1, 1, 1, K)).at[..., 3].set(1)
    arrays |= {name: key.astype(dtype) for name in ("q", "k")}
    arrays |= {"v": jnp.full((1, 1, 1, V), 4096, dtype), "g": jnp.zeros((1, 1, 1)), "beta": jnp.full((1, 1, 1), 0.5)}
    arrays["state"] = jnp.zeros((1, 1, K, V)).at[:, :, 3].set(4096 - residual)

    def read(beta):
        return jnp.sum(step(arrays | {"beta": beta})[1])

    state = step(arrays)[1]
    np.testing.assert_allclose(state[0, 0, 3], 4096 - residual / 2, rtol=1e-6)
    np.testing.assert_allclose(jax.grad(read)(arrays["beta"]), V * residual, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_large_state_is_read_without_nan(dtype):
    # The state is float32 whatever q is; an output is what the dtype of v has for it, infinity past 65504 in float16.
    arrays = arguments(T=3, dtype=dtype)
    arrays["state"] = jnp.abs(arrays["state"]) * jnp.asarray([1e1, 1e4, 1e5, 1e6])[:, None, None, None]
    arrays["q"] = jnp.abs(arrays["q"])
    o, state = step(arrays)
    truth, after, _ = by_hand(arrays)
    assert np.isfinite(np.asarray(state)).all()
    np.testing.assert_allclose(state, after, rtol=1e-5, atol=1e-5 * np.abs(after).max())
    limit = float(jnp.finfo(dtype).max)
    o = np.asarray(o, np.float64)
    fits = np.abs(truth) < 0.99 * limit
    assert fits.any()
    assert fits.all() == (dtype == "bfloat16")
    eps = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(o[fits], truth[fits], rtol=eps, atol=eps)
    past = np.abs(truth) > 1.01 * limit
    np.testing.assert_array_equal(o[past], np.sign(truth[past]) * np.inf)
