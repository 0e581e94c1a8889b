"""How wrong a result may be: one measure and one rule, for every path.

The measure is the root mean square of the error over that of the truth, head by head, since heads that forget at once
and heads that never do have errors of their own; the worst head counts.

The rule: an operand rounded to p bits has a relative error of about `2 ** (1 - p) / sqrt(12) / 1.4` in the mean (1.4:
of the mantissa). The errors of the n roundings between the inputs and a result are independent, so they add up to
sqrt(n) of it. Twice that is the limit. Truth is the float64 oracle on the same, already rounded, inputs.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# Roundings on the way to a result. Forward: of the state, of V - K S, of the inverse, of the updates and, for the
# output, of Q K^T and of the output itself. Backward: those of the forward, then of the cotangents of the state and of
# the updates, of the inverse again, of the products of two chunk matrices, and of the gradient itself.
ROUNDINGS = {
    "o": 6,
    "final_state": 4,
    "dq": 8,
    "dk": 12,
    "dv": 10,
    "dg": 12,
    "dbeta": 12,
    "dinitial_state": 10,
}
SLACK = 2
# Where the truth is smaller, float32 has not all of its digits, so an error counts as if it were this.
SMALLEST = float(np.finfo(np.float32).tiny / np.finfo(np.float32).eps)
# 32 eps: sums of a hundred terms, and those of a chain of products. A decay of exp(-x) alone has an error of x eps.
FLOAT32_LIMIT = 4e-6


def limit(dtype: Any, what: str, roundings: int = 0) -> float:
    """The largest `relative_rms` of a result of a call with q, k and v of this dtype; `roundings` come on top."""
    eps = float(jnp.finfo(dtype).eps)
    if jnp.dtype(dtype).itemsize >= 4:
        return FLOAT32_LIMIT
    return SLACK * (ROUNDINGS[what] + roundings) ** 0.5 * eps / 12**0.5 / 1.4


def relative_rms(actual: Any, expected: Any, per_head: bool = True, head_axis: int = 2) -> float:
    """The root mean square of the error over that of `expected`, of the worst head.

    Any NaN or infinity is an infinite error. A head that should be zero throughout must be, but for underflow.

    Args:
        actual: The result.
        expected: The truth, of the same shape.
        per_head: Whether to take heads one by one, or all elements at once.
        head_axis: Where the heads are: 2 for arrays of tokens, 1 for states.
    """
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert np.isfinite(expected).all(), "the truth must be finite"
    if not np.isfinite(actual).all():
        return float("inf")
    if actual.size == 0:
        return 0.0
    axes = tuple(axis for axis in range(actual.ndim) if not per_head or axis != head_axis)
    error, size = (np.sqrt(np.square(x).mean(axes)) for x in (actual - expected, expected))
    return float((error / np.maximum(size, SMALLEST)).max(initial=0))


def check(actual: Any, expected: Any, dtype: Any, what: str, roundings: int = 0, **options: Any) -> None:
    """Asserts that a result, named as in `ROUNDINGS`, is within its limit; says where it is worst if not."""
    head_axis = 1 if what in ("final_state", "dinitial_state") else 2
    error, bound = relative_rms(actual, expected, head_axis=head_axis, **options), limit(dtype, what, roundings)
    if error <= bound:
        return
    difference = np.abs(np.asarray(actual, np.float64) - np.asarray(expected, np.float64))
    worst = np.unravel_index(np.nanargmax(np.where(np.isnan(difference), np.inf, difference)), difference.shape)
    place = tuple(int(i) for i in worst)
    raise AssertionError(
        f"{what}: relative RMS {error:.2e} > {bound:.2e}; worst at {place}: "
        f"got {float(actual[worst]):.6g}, want {float(expected[worst]):.6g}"
    )


def assert_trees_close(actual: Any, expected: Any) -> None:
    """Asserts that arrays of two float32 computations of the same agree to 1e-5, element by element."""
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=1e-5)
