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


def test_gradients():
    arrays = arguments(T=2)
    weights = (
        np.random.default_rng(1).standard_normal((B, 2, HV, V)),
        np.random.default_rng(2).standard_normal((B, HV, K, V)),
    )

    def value(results):
        return sum((x * w).sum() for x, w in zip(results[:2], weights, strict=True))

    gradients = jax.grad(lambda arrays: value(step(arrays)))(arrays)
    rng = np.random.default_rng(3)
    for name, gradient in gradients.items():
        direction = rng.standard_normal(gradient.shape)
        ends = []
        for sign in (1e-5, -1e-5):
            moved = {n: np.asarray(x, np.float64) for n, x in arrays.items()}
            moved[name] = moved[name] + sign * direction
            ends.append(value(by_hand(moved)))
        slope = (ends[0] - ends[1]) / 2e-5
        np.testing.assert_allclose(np.sum(np.asarray(gradient) * direction), slope, rtol=1e-4, atol=1e-4)


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
