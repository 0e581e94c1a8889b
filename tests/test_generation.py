"""Tokens are drawn from the distribution that the options of generation name."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxqla.models import generation

PROBABILITIES = np.array([0.04, 0.3, 0.16, 0.5])
DRAWS = 4000


def frequencies(**options) -> np.ndarray:
    """Shares of the tokens in many draws from the same logits, shifted by what softmax does not see."""
    sampling = generation._Sampling(
        **{"temperature": 1.0, "top_k": None, "top_p": None, "stop": (), "pad": 0} | options
    )
    logits = jnp.broadcast_to(jnp.log(PROBABILITIES.astype(np.float32)) + 7, (DRAWS, 4))
    tokens, _, _ = generation._first(logits, jnp.zeros(DRAWS, bool), jax.random.key(3), sampling)
    return np.bincount(np.asarray(tokens), minlength=4) / DRAWS


@pytest.mark.parametrize(
    ("options", "weights"),
    [
        ({}, PROBABILITIES),
        ({"temperature": 2.0}, PROBABILITIES**0.5),
        ({"top_k": 2}, PROBABILITIES * [0, 1, 0, 1]),
        ({"top_k": 9}, PROBABILITIES),
        # 0.5 and 0.3 do not reach 0.81; 0.16 takes them there.
        ({"top_p": 0.81}, PROBABILITIES * [0, 1, 1, 1]),
        ({"top_p": 0.79}, PROBABILITIES * [0, 1, 0, 1]),
        # Of the two that top_k leaves, the first alone has 0.625.
        ({"top_k": 2, "top_p": 0.6}, [0, 0, 0, 1]),
        ({"temperature": 0.0}, [0, 0, 0, 1]),
    ],
)
def test_draws_follow_the_options(options, weights):
    expected = np.asarray(weights) / np.sum(weights)
    got = frequencies(**options)
    np.testing.assert_array_equal(got[expected == 0], 0)
    # Five standard deviations of a share.
    assert np.all(np.abs(got - expected) <= 5 * np.sqrt(expected * (1 - expected) / DRAWS))


def test_rows_that_have_ended_get_padding_and_stay_ended():
    sampling = generation._Sampling(0.0, None, None, (3, 1), 2)
    logits = jnp.eye(4)[jnp.array([3, 0, 1, 3])]
    done = jnp.array([False, False, False, True])
    tokens, done, _ = generation._first(logits, done, jax.random.key(0), sampling)
    np.testing.assert_array_equal(tokens, [3, 0, 1, 2])
    np.testing.assert_array_equal(done, [True, False, True, True])
