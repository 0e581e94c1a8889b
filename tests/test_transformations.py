"""The op under JAX's transformations, alone and nested, against calls one by one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxqla
from tests import cases

CLOSE = {"rtol": 2e-6, "atol": 2e-6}


def op(q, k, v, g, beta, initial_state, segment_ids=None):
    return jaxqla.gated_delta(
        q, k, v, g, beta, initial_state=initial_state, segment_ids=segment_ids, return_final_state=True
    )


def inputs(seed=0):
    return list(cases.make(B=2, T=5, H=1, HV=2, K=4, V=3, dtype="float32", initial_state=True, seed=seed)[:6])


def assert_close(actual, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **CLOSE), actual, expected)


# -- rematerialisation -------------------------------------------------------------------------------------------------


def gradient_of_layers(policy):
    """The gradient of a loop over layers, so that the compiler cannot merge two forwards; "off" for no checkpoint."""

    def layer(x, state, k, v, g, beta):
        o, state = op(jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, 1))), k, v, g, beta, state)
        # The sines need the results again.
        return jnp.sin(o)[:, :, :1], jnp.sin(state)

    if policy != "off":
        layer = jax.checkpoint(layer, policy=policy)

    def total(q, k, v, g, beta, state):
        (x, state), _ = jax.lax.scan(
            lambda carry, _: (layer(*carry, k, v, g, beta), None), (q[..., :3], state), length=2
        )
        return jnp.sum(x) + jnp.sum(state)

    return jax.jit(jax.grad(total, argnums=range(6)))


def only(*names):
    return jax.checkpoint_policies.save_only_these_names(*names)


@pytest.mark.parametrize(
    ("policy", "kept"),
    [
        (jaxqla.save_residuals, True),
        (only(jaxqla.OUTPUT_NAME, jaxqla.FINAL_STATE_NAME), True),
        (only(jaxqla.OUTPUT_NAME), False),
        (only(jaxqla.FINAL_STATE_NAME), False),
        (None, False),
    ],
    ids=["save_residuals", "both names", "output", "final state", "none"],
)
def test_a_second_forward_runs_unless_both_results_are_kept(policy, kept):
    def calls(policy):
        return gradient_of_layers(policy).lower(*inputs()).as_text().count("call @gated_delta")

    assert calls(policy) == calls("off") + (not kept)


def test_rematerialised_gradients():
    assert_close(*(gradient_of_layers(policy)(*inputs()) for policy in (jaxqla.save_residuals, "off")))


# -- vmap, grad and scan in each other ---------------------------------------------------------------------------------


def value(*arrays):
    return sum(jnp.sum(jnp.sin(x)) for x in op(*arrays))


gradients = jax.grad(value, argnums=range(6))


@pytest.fixture(scope="module")
def stacked():
    """Arguments with two axes in front, 2 by 3."""
    several = [inputs(seed) for seed in range(6)]
    return [jnp.stack(x).reshape(2, 3, *x[0].shape) for x in zip(*several, strict=True)]


def one_by_one(function, pick):
    """`function` called for each place of the axes in front, with the arrays that `pick` takes for it."""
    results = [jax.jit(function)(*pick(i, j)) for i in range(2) for j in range(3)]
    return jax.tree.map(lambda *x: np.stack(x).reshape(2, 3, *x[0].shape), *results)


def test_nested_vmap_over_axes_that_differ(stacked):
    # q and the state vary over the outer axis, v over the inner, beta over both, g over the inner as its last axis.
    q, k, v, g, beta, state = stacked
    got = jax.vmap(
        jax.vmap(op, in_axes=(None, None, 0, -1, 0, None)), in_axes=(0, None, None, None, 0, 0), out_axes=(0, 1)
    )(q[:, 0], k[0, 0], v[0], jnp.moveaxis(g[0], 0, -1), beta, state[:, 0])
    want = one_by_one(op, lambda i, j: (q[i, 0], k[0, 0], v[0, j], g[0, j], beta[i, j], state[i, 0]))
    assert_close((got[0], jnp.moveaxis(got[1], 1, 0)), want)


def test_nested_vmap_of_grad(stacked):
    want = one_by_one(gradients, lambda i, j: [x[i, j] for x in stacked])
    assert_close(jax.jit(jax.vmap(jax.vmap(gradients)))(*stacked), want)


def test_grad_of_nested_vmap_sums_over_what_is_shared(stacked):
    q, *rest = stacked

    def total(q, *rest):
        return jnp.sum(jax.vmap(jax.vmap(value, in_axes=(None, *[0] * 5)), in_axes=(0, *[0] * 5))(q, *rest))

    got = jax.jit(jax.grad(total, argnums=range(6)))(q[:, 0], *rest)
    dq, *others = one_by_one(gradients, lambda i, j: [q[i, 0], *(x[i, j] for x in rest)])
    assert_close(got, (dq.sum(axis=1), *others))


def test_scan_over_calls_and_its_gradient(stacked):
    # The state goes from call to call; keys and gates vary, the rest is shared.
    q, k, v, g, beta, state = (x[0] for x in stacked)

    def in_scan(q, k, v, g, beta, state):
        def step(state, kg):
            o, state = op(q, kg[0], v, kg[1], beta, state)
            return state, o

        state, o = jax.lax.scan(step, state, (k, g))
        return jnp.sum(jnp.sin(o)) + jnp.sum(jnp.cos(state))

    def in_turn(q, k, v, g, beta, state):
        total = 0.0
        for i in range(3):
            o, state = op(q, k[i], v, g[i], beta, state)
            total += jnp.sum(jnp.sin(o))
        return total + jnp.sum(jnp.cos(state))

    arrays = (q[0], k, v[0], g, beta[0], state[0])
    got, want = (jax.jit(jax.value_and_grad(f, argnums=range(6)))(*arrays) for f in (in_scan, in_turn))
    assert_close(got, want)


def test_vmap_of_packed_rows(stacked):
    boundaries = jnp.asarray([[0, 2, 5], [0, 4, 4]], jnp.int32)
    rows = [x[:2, 0, :1] for x in stacked[:5]]
    states = stacked[5][:2, 0]

    def packed(cu_seqlens, state, *arrays):
        return jaxqla.gated_delta(*arrays, initial_state=state, cu_seqlens=cu_seqlens, return_final_state=True)

    got = jax.jit(jax.vmap(packed))(boundaries, states, *rows)
    want = [jax.jit(packed)(boundaries[i], states[i], *(x[i] for x in rows)) for i in range(2)]
    assert_close(got, jax.tree.map(lambda *x: np.stack(x), *want))


# -- shapes, dtypes, buffers -------------------------------------------------------------------------------------------


def test_abstract_evaluation_of_gradients_of_mapped_calls(stacked):
    ids = jax.ShapeDtypeStruct((2, 3, 2, 5), jnp.int32)
    shapes = jax.tree.map(lambda x: (x.shape, x.dtype), stacked)
    # Abstract all the way: nothing may ask for a value.
    got = jax.eval_shape(jax.vmap(jax.vmap(jax.grad(value, argnums=range(6)))), *stacked, ids)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), list(got)) == shapes


def test_64_bit_mode_under_vmap_and_grad(stacked):
    function = jax.jit(jax.vmap(gradients))
    arrays = [x[0] for x in stacked]
    narrow = function(*arrays)
    with jax.enable_x64(True):
        wide = function(*arrays)
    assert all(x.dtype == jnp.float32 for x in wide)
    jax.tree.map(np.testing.assert_array_equal, narrow, wide)


def test_donated_arguments_share_their_buffers(stacked):
    # An update of the state: its buffer is used again, also under vmap and in the gradient's step.
    def update(state, arrays):
        return state - 0.1 * jax.vmap(jax.grad(lambda s, *x: value(*x, s)))(state, *arrays)

    *arrays, state = (x[0] for x in stacked)
    compiled = jax.jit(update, donate_argnums=0).lower(state, arrays).compile()
    assert compiled.memory_analysis().alias_size_in_bytes == state.nbytes
    want = jax.jit(update)(state, arrays)
    given = jnp.array(state)
    np.testing.assert_array_equal(compiled(given, arrays), want)
    assert given.is_deleted()
