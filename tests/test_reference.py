"""Is the oracle right? Judged by what is known without it: closed forms, a loop in NumPy, finite differences."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxqla import reference
from tests import cases

EPS = 1e-12


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


def oracle(inputs, **options):
    o, state = reference.gated_delta(*inputs[:5], **rest(inputs), return_final_state=True, dtype=jnp.float64, **options)
    return np.asarray(o), np.asarray(state)


def rest(inputs):
    return {name: getattr(inputs, name) for name in ("initial_state", "segment_ids", "cu_seqlens")}


def wide(**options):
    """Inputs in float64, so that closed forms hold to its last digits."""
    inputs = cases.make(**{"B": 2, "T": 7, "H": 2, "HV": 6, "K": 5, "V": 4, "dtype": "float64", **options})
    return inputs._replace(
        **{
            name: x.astype(jnp.float64)
            for name, x in inputs._asdict().items()
            if name in ("g", "beta") and x is not None
        }
    )


def numpy64(inputs):
    return (None if x is None else np.asarray(x, np.float64) for x in inputs[:6])


def by_hand(q, k, v, g, beta, state, scale):
    """One row and head, written as four lines of NumPy: q, k `[T, K]`, v `[T, V]`, g, beta `[T]`, state `[K, V]`."""
    o = []
    for t in range(len(q)):
        state = np.exp(g[t]) * state
        error = v[t] - k[t] @ state
        state = state + np.outer(k[t], beta[t] * error)
        o.append(scale * q[t] @ state)
    return np.array(o).reshape(len(q), v.shape[1]), state


# -- closed forms ------------------------------------------------------------------------------------------------------


def test_one_token_writes_and_reads_itself():
    inputs = wide(T=1)
    q, k, v, _, beta, _ = numpy64(inputs)
    o, state = oracle(inputs, scale=0.3)
    k, q = (np.repeat(x[:, 0], 3, axis=1) for x in (k, q))
    u = beta[:, 0, :, None] * v[:, 0]
    np.testing.assert_allclose(state, k[..., None] * u[..., None, :], atol=EPS)
    np.testing.assert_allclose(o[:, 0], 0.3 * np.sum(q * k, -1, keepdims=True) * u, atol=EPS)


def test_without_writing_the_state_only_decays():
    inputs = wide(beta=0.0, initial_state=True)
    q, _, _, g, _, S = numpy64(inputs)
    o, state = oracle(inputs)
    decay = np.exp(np.cumsum(g, axis=1))
    np.testing.assert_allclose(state, decay[:, -1, :, None, None] * S, atol=EPS)
    want = np.einsum("bthk,bhkv->bthv", np.repeat(q, 3, axis=2), S) * decay[..., None] * 5**-0.5
    np.testing.assert_allclose(o, want, atol=EPS)


@pytest.mark.parametrize("gate", [-np.inf, -1e4])
def test_a_gate_of_zero_forgets_everything_before(gate):
    inputs = wide(gates=gate, initial_state=True)
    q, k, v, _, beta, _ = numpy64(inputs)
    o, _ = oracle(inputs, scale=1.0)
    want = np.repeat(np.sum(q * k, -1), 3, axis=2)[..., None] * beta[..., None] * v
    np.testing.assert_allclose(o, want, atol=EPS)


def test_the_same_unit_key_replaces_its_value():
    inputs = wide(gates=0.0, beta=1.0)
    inputs = inputs._replace(k=jnp.broadcast_to(inputs.k[:, :1], inputs.k.shape))
    q, k, v, *_ = numpy64(inputs)
    o, state = oracle(inputs, scale=1.0)
    np.testing.assert_allclose(o, np.repeat(np.sum(q * k, -1), 3, axis=2)[..., None] * v, atol=EPS)
    key = np.repeat(k[:, 0], 3, axis=1)
    np.testing.assert_allclose(state, key[..., None] * v[:, -1, :, None], atol=EPS)


def test_orthonormal_keys_are_linear_attention_with_decay():
    inputs = wide(T=5)
    k = np.broadcast_to(np.eye(5)[None, :, None], inputs.k.shape)
    q, _, v, g, beta, _ = numpy64(inputs)
    o, _ = oracle(inputs._replace(k=jnp.asarray(k)), scale=1.0)
    G = np.cumsum(g, axis=1)
    decay = np.exp(G[:, :, None] - G[:, None]) * np.tril(np.ones((5, 5)))[None, :, :, None]
    scores = np.repeat(np.einsum("bihk,bjhk->bijh", q, k), 3, axis=3)
    np.testing.assert_allclose(o, np.einsum("bijh,bjhv->bihv", decay * scores * beta[:, None], v), atol=EPS)


def test_three_tokens_worked_out_by_hand():
    ones = jnp.ones((1, 3, 1, 1), jnp.float64)
    g = jnp.log(jnp.array([0.5, 0.25, 0.5], jnp.float64)).reshape(1, 3, 1)
    beta = jnp.array([0.5, 1.0, 0.25], jnp.float64).reshape(1, 3, 1)
    k = jnp.array([1.0, 0.5, 2.0], jnp.float64).reshape(1, 3, 1, 1)
    v = jnp.array([8.0, 4.0, -6.0], jnp.float64).reshape(1, 3, 1, 1)
    inputs = cases.Inputs(ones, k, v, g, beta, jnp.full((1, 1, 1, 1), 4.0, jnp.float64), None, None)
    # S: 4 -> 2, error 6, +3 -> 5; -> 1.25, error 3.375, +1.6875 -> 2.9375; -> 1.46875, error -8.9375, -4.46875 -> -3.
    o, state = oracle(inputs, scale=1.0)
    np.testing.assert_allclose(o.ravel(), [5, 2.9375, -3], atol=EPS)
    np.testing.assert_allclose(state.ravel(), [-3], atol=EPS)


# -- a loop in NumPy ---------------------------------------------------------------------------------------------------


def test_every_row_and_head_is_the_recurrence():
    inputs = wide(initial_state=True, normalised=False)
    q, k, v, g, beta, S = numpy64(inputs)
    o, state = oracle(inputs)
    for b in range(2):
        for h in range(6):
            want = by_hand(q[b, :, h // 3], k[b, :, h // 3], v[b, :, h], g[b, :, h], beta[b, :, h], S[b, h], 5**-0.5)
            np.testing.assert_allclose(o[b, :, h], want[0], rtol=1e-9, atol=EPS)
            np.testing.assert_allclose(state[b, h], want[1], rtol=1e-9, atol=EPS)


def pieces(ids):
    """Tokens of each stretch of a row between resets, padding left out, with whether the initial state enters it."""
    stretches, last = [], None
    for t, i in enumerate(ids):
        if i == 0:
            continue
        if i != last:
            stretches.append([])
        stretches[-1].append(t)
        last = i
    return stretches


@pytest.mark.parametrize(
    "ids",
    [
        [1, 1, 1, 1, 1, 1, 1],
        [1, 1, 2, 2, 2, 3, 3],
        [0, 0, 5, 5, 0, 5, 2],  # padding within a segment is no boundary
        [1, 0, 2, 0, 1, 0, 0],  # an id may come back
        [0, 0, 0, 0, 0, 0, 0],
    ],
)
def test_segments_are_calls_of_their_own(ids):
    inputs = wide(B=1, initial_state=True, segment_ids=[ids])
    q, k, v, g, beta, S = numpy64(inputs)
    o, state = oracle(inputs.poisoned(), scale=0.7)
    want, want_state = np.zeros_like(o), S.copy()
    for h in range(6):
        for i, tokens in enumerate(pieces(ids)):
            before = S[0, h] if i == 0 else np.zeros_like(S[0, h])
            row = (x[0, tokens, h // 3] for x in (q, k))
            want[0, tokens, h], want_state[0, h] = by_hand(*row, *(x[0, tokens, h] for x in (v, g, beta)), before, 0.7)
    np.testing.assert_allclose(o, want, atol=EPS)
    np.testing.assert_allclose(state, want_state, atol=EPS)


@pytest.mark.parametrize("boundaries", [[0, 7], [0, 3, 7], [0, 0, 2, 2, 5, 5], [0, 0, 0]])
def test_packed_sequences_are_calls_of_their_own(boundaries):
    inputs = wide(B=1, initial_state=True, cu_seqlens=boundaries)
    q, k, v, g, beta, S = numpy64(inputs)
    o, state = oracle(inputs.poisoned(), scale=0.7)
    want = np.zeros_like(o)
    for n, tokens in enumerate(slice(*ends) for ends in itertools.pairwise(boundaries)):
        for h in range(6):
            row = (x[0, tokens, h // 3] for x in (q, k))
            want[0, tokens, h], end = by_hand(*row, *(x[0, tokens, h] for x in (v, g, beta)), S[n, h], 0.7)
            np.testing.assert_allclose(state[n, h], end, atol=EPS)
    np.testing.assert_allclose(o, want, atol=EPS)


def test_normalised_keys_keep_their_direction_and_small_ones_stay_small():
    sizes = np.array([0, 1e-4, 1e-3, 1, 100]).reshape(1, 5, 1, 1)
    inputs = wide(B=1, T=5)
    inputs = inputs._replace(k=inputs.k * sizes, q=inputs.q * sizes[:, ::-1])
    k = sizes / np.sqrt(sizes**2 + 1e-6) * np.asarray(wide(B=1, T=5).k)
    q = sizes[:, ::-1] / np.sqrt(sizes[:, ::-1] ** 2 + 1e-6) * np.asarray(wide(B=1, T=5).q)
    got = oracle(inputs, qk_l2norm=True)
    want = oracle(inputs._replace(q=jnp.asarray(q), k=jnp.asarray(k)))
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, atol=EPS)


# -- gradients ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"B": 1, "cu_seqlens": [0, 3, 3, 6]},
        {"segment_ids": [[1, 1, 0, 1, 2, 2, 0], [0, 3, 3, 3, 3, 1, 1]]},
    ],
)
def test_gradients_are_finite_differences(options):
    inputs = wide(initial_state=True, **options)
    shapes = (inputs.v.shape, inputs.initial_state.shape)
    rng = np.random.default_rng(1)
    weights = [rng.standard_normal(shape) for shape in shapes]

    @jax.jit
    def loss(floats):
        results = reference.gated_delta(
            **floats, **{n: x for n, x in rest(inputs).items() if n != "initial_state"},
            return_final_state=True, qk_l2norm=True, dtype=jnp.float64,
        )  # fmt: skip
        return sum(jnp.sum(w * x) for w, x in zip(weights, results, strict=True))

    floats = inputs.floats | {"initial_state": inputs.initial_state.astype(jnp.float64)}
    grads = jax.grad(loss)(floats)
    for name, x in floats.items():
        direction = rng.standard_normal(x.shape)
        step = 1e-6 * direction
        slope = (loss(floats | {name: x + step}) - loss(floats | {name: x - step})) / 2e-6
        np.testing.assert_allclose(np.sum(grads[name] * direction), slope, rtol=1e-7, atol=1e-8, err_msg=name)


def test_padding_has_no_gradient_whatever_it_holds():
    inputs = wide(segment_ids=[[1, 1, 0, 1, 2, 2, 0], [0, 3, 3, 3, 3, 1, 1]]).poisoned()

    def loss(floats):
        o, _ = reference.gated_delta(**floats, segment_ids=inputs.segment_ids, dtype=jnp.float64, qk_l2norm=True)
        return jnp.sum(jnp.sin(o))

    for name, x in jax.grad(loss)(inputs.floats).items():
        assert np.isfinite(x).all(), name
        np.testing.assert_array_equal(np.asarray(x)[inputs.padding], 0)


# -- arguments ---------------------------------------------------------------------------------------------------------


def test_the_dtype_is_that_of_the_results():
    inputs = wide()
    for dtype in (jnp.float32, jnp.float64, jnp.bfloat16):
        o, state = reference.gated_delta(*inputs[:5], return_final_state=True, dtype=dtype)
        assert (o.dtype, state.dtype) == (dtype, dtype)
    assert reference.gated_delta(*inputs[:5])[1] is None


def test_what_it_refuses():
    inputs = wide(B=1, cu_seqlens=[0, 7])
    with pytest.raises(ValueError, match=r"^reference.gated_delta: cu_seqlens must come without segment_ids, got both"):
        oracle(inputs._replace(segment_ids=jnp.ones((1, 7), jnp.int32)))
    with (
        jax.enable_x64(False),
        pytest.raises(ValueError, match=r"dtype must be enabled by jax_enable_x64, got float64"),
    ):
        oracle(inputs)
