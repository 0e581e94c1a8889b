"""Inputs for the tests of every path: the same numbers wherever they run, rounded to the dtype of the call."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

FLOATS = ("q", "k", "v", "g", "beta", "initial_state")


class Inputs(NamedTuple):
    """Arrays of one call of `gated_delta`, in the order of its arguments."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    g: jax.Array
    beta: jax.Array
    initial_state: jax.Array | None
    segment_ids: jax.Array | None
    cu_seqlens: jax.Array | None

    @property
    def floats(self) -> dict[str, jax.Array]:
        """The arguments that have gradients."""
        return {name: x for name, x in self._asdict().items() if name in FLOATS and x is not None}

    @property
    def padding(self) -> np.ndarray:
        """Where tokens are padding, `[B, T]`."""
        B, T = self.q.shape[:2]
        if self.segment_ids is not None:
            return np.asarray(self.segment_ids) == 0
        end = T if self.cu_seqlens is None else int(self.cu_seqlens[-1])
        return np.broadcast_to(np.arange(T) >= end, (B, T))

    def poisoned(self, value: float = np.nan) -> "Inputs":
        """The same call with `value` in every input at padding."""

        def poison(x):
            return jnp.where(self.padding.reshape(self.padding.shape + (1,) * (x.ndim - 2)), value, x)

        return self._replace(**{name: poison(getattr(self, name)) for name in ("q", "k", "v", "g", "beta")})


def make(
    *,
    B: int,
    T: int,
    H: int,
    HV: int,
    K: int = 128,
    V: int = 128,
    dtype: Any = "bfloat16",
    gates: Any = "softplus",
    seed: int = 0,
    initial_state: Any = False,
    segment_ids: Any = None,
    cu_seqlens: Any = None,
    normalised: bool = True,
    beta: Any = "sigmoid",
) -> Inputs:
    """Makes the arguments of a call.

    Args:
        B: Rows.
        T: Tokens of a row.
        H: Heads of q and k.
        HV: Heads of v.
        K: Width of q and k.
        V: Width of v.
        dtype: Of q, k and v; g, beta and the state are float32.
        gates: `"softplus"`: from a memory of a hundred tokens at the first head to less than one at the last; or g
            itself, a number or an array that broadcasts to `[B, T, HV]`.
        seed: Of the random numbers.
        initial_state: Whether to have one, or the array.
        segment_ids: Array `[B, T]`, or None.
        cu_seqlens: Boundaries, or None.
        normalised: Whether q and k have length one (before rounding), else they are standard normal.
        beta: `"sigmoid"` for random numbers in (0, 1); or beta itself, like `gates`.
    """
    rng = np.random.default_rng(seed)
    N = B if cu_seqlens is None else len(cu_seqlens) - 1
    # One order of draws, whatever the options, so that a case and its variant share their numbers.
    q, k = (_direction(rng.standard_normal((B, T, H, K)), normalised) for _ in range(2))
    v = rng.standard_normal((B, T, HV, V))
    rates = np.geomspace(0.01, 4, HV) if HV > 1 else np.array([0.1])
    softplus = -rates * np.log1p(np.exp(rng.standard_normal((B, T, HV))))
    sigmoid = 1 / (1 + np.exp(-rng.standard_normal((B, T, HV))))
    # Drawn last, and only if asked for: it may be large.
    state = rng.standard_normal((N, HV, K, V)) if initial_state is True else initial_state
    g = softplus if isinstance(gates, str) else np.broadcast_to(gates, softplus.shape)
    b = sigmoid if isinstance(beta, str) else np.broadcast_to(beta, sigmoid.shape)
    return Inputs(
        q=jnp.asarray(q, dtype),
        k=jnp.asarray(k, dtype),
        v=jnp.asarray(v, dtype),
        g=jnp.asarray(g, jnp.float32),
        beta=jnp.asarray(b, jnp.float32),
        initial_state=None if initial_state is False else jnp.asarray(state, jnp.float32),
        segment_ids=None if segment_ids is None else jnp.asarray(segment_ids, jnp.int32),
        cu_seqlens=None if cu_seqlens is None else jnp.asarray(cu_seqlens, jnp.int32),
    )


def _direction(x: np.ndarray, normalised: bool) -> np.ndarray:
    return x / np.linalg.norm(x, axis=-1, keepdims=True) if normalised else x
