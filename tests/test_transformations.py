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
