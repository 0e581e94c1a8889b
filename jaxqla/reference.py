"""The oracle: the ops written down as they are defined, token by token, in any floating dtype.

It judges every other path, so it shares no code with them and is written to be read, not to be fast.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

HIGHEST = lax.Precision.HIGHEST


def gated_delta(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T HV V"],
    g: Float[Array, "B T HV"],
    beta: Float[Array, "B T HV"],
    *,
    scale: float | None = None,
    initial_state: Float[Array, "N HV K V"] | None = None,
    return_final_state: bool = False,
    segment_ids: Int[Array, "B T"] | None = None,
    cu_seqlens: Int[Array, " N+1"] | None = None,
    qk_l2norm: bool = False,
    dtype: DTypeLike = jnp.float32,
) -> tuple[Float[Array, "B T HV V"], Float[Array, "N HV K V"] | None]:
    """Computes the gated delta rule one token after the other, all of it in `dtype`.

        S   = exp(g_t) S
        u_t = beta_t (v_t - S^T k_t)
        S   = S + k_t u_t^T
        o_t = scale S^T q_t

    The arguments are those of `jaxqla.gated_delta`, converted to `dtype` first, so that given bfloat16 inputs and
    float64 it tells what those very inputs should give. Nothing is rounded on the way, normalised keys included.
    JAX differentiates it; it keeps about `2 sqrt(T)` states for that.

    Args:
        q: Queries.
        k: Keys.
        v: Values.
        g: Natural logarithm of the decay at each token, <= 0, -inf included.
        beta: Step size.
        scale: Factor of the output, by default `K ** -0.5`.
        initial_state: State before the first token of each sequence, by default zero.
        return_final_state: Whether to return the state after the last token of each sequence.
        segment_ids: Id of the sequence of each token; a change starts from a zero state, 0 is padding.
        cu_seqlens: Boundaries of the sequences in the only row; what follows the last one is padding.
        qk_l2norm: Whether to scale each query and key first, by `1 / sqrt(|x|^2 + 1e-6)`.
        dtype: Of the computation and of the results. float64 needs `jax_enable_x64`.

    Returns:
        `o`, exactly 0 at padding whatever its inputs hold, and the final state, or None where it was not asked for.

    Raises:
        ValueError: `dtype` is not available, or both `segment_ids` and `cu_seqlens` are given.

    Source: Yang, Kautz, Hatamizadeh, "Gated Delta Networks: Improving Mamba2 with Delta Rule", ICLR 2025, equation 10.
    """
    _check("reference.gated_delta", dtype, segment_ids, cu_seqlens)
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    factor = K**-0.5 if scale is None else scale

    slots, valid, N = _tokens(B, T, segment_ids, cu_seqlens)
    states = jnp.zeros((N, HV, K, V), dtype) if initial_state is None else initial_state.astype(dtype)
    if slots is not None:
        states = jnp.concatenate([states, jnp.zeros((1, HV, K, V), dtype)])

    # Masked before anything is computed from it, so that no NaN at padding reaches a result or a gradient.
    q, k, v, g, beta = (
        jnp.where(valid.reshape(B, T, *[1] * (x.ndim - 2)), x.astype(dtype), 0) for x in (q, k, v, g, beta)
    )
    if qk_l2norm:
        q, k = _l2norm(q), _l2norm(k)
    q, k = jnp.repeat(q, HV // H, axis=2), jnp.repeat(k, HV // H, axis=2)

    def step(carry, token):
        states, last_id = carry
        q, k, v, g, beta, segment_id, slot = token
        S = states if slot is None else states[slot][None]
        if segment_id is not None:
            starts = (segment_id != 0) & (last_id != 0) & (segment_id != last_id)
            S = jnp.where(starts[:, None, None, None], 0, S)
            last_id = jnp.where(segment_id != 0, segment_id, last_id)
        S = jnp.exp(g)[..., None, None] * S
        u = beta[..., None] * (v - jnp.einsum("bhkv,bhk->bhv", S, k, precision=HIGHEST))
        S = S + k[..., :, None] * u[..., None, :]
        o = factor * jnp.einsum("bhkv,bhk->bhv", S, q, precision=HIGHEST)
        states = S if slot is None else states.at[slot].set(S[0])
        return (states, last_id), o

    tokens = [None if x is None else jnp.moveaxis(x, 1, 0) for x in (q, k, v, g, beta, segment_ids)]
    last_id = None if segment_ids is None else jnp.zeros_like(segment_ids, shape=(B,))
    (states, _), o = _scan(step, (states, last_id), (*tokens, slots), T)
    o = jnp.where(valid[..., None, None], jnp.moveaxis(o, 0, 1), 0)
    return o, states[:N] if return_final_state else None


def causal_conv1d(
    x: Float[Array, "B T D"],
    weight: Float[Array, "W D"],
    bias: Float[Array, " D"] | None = None,
    *,
    activation: str | None = None,
    initial_state: Float[Array, "N W-1 D"] | None = None,
    return_final_state: bool = False,
    segment_ids: Int[Array, "B T"] | None = None,
    cu_seqlens: Int[Array, " N+1"] | None = None,
    dtype: DTypeLike = jnp.float32,
) -> tuple[Float[Array, "B T D"], Float[Array, "N W-1 D"] | None]:
    """Computes a causal convolution of each channel one token after the other, all of it in `dtype`.

        window = [state, x_t]               the last W inputs, oldest first
        y_t    = act(sum_j weight_j window_j + bias)
        state  = window without its oldest

    The arguments are those of `jaxqla.causal_conv1d`, converted to `dtype` first. JAX differentiates it.

    Args:
        x: Inputs.
        weight: Taps, that of the current token last.
        bias: Added to each output.
        activation: None, or `"silu"`, also called `"swish"`.
        initial_state: Inputs before the first token of each sequence, oldest first, by default zero.
        return_final_state: Whether to return the last `W - 1` inputs of each sequence.
        segment_ids: Id of the sequence of each token; a change starts from a zero state, 0 is padding.
        cu_seqlens: Boundaries of the sequences in the only row; what follows the last one is padding.
        dtype: Of the computation and of the results. float64 needs `jax_enable_x64`.

    Returns:
        `y`, exactly 0 at padding whatever its inputs hold, and the final state, or None where it was not asked for.

    Raises:
        ValueError: `dtype` is not available, or both `segment_ids` and `cu_seqlens` are given.
    """
    _check("reference.causal_conv1d", dtype, segment_ids, cu_seqlens)
    B, T, D = x.shape
    W = weight.shape[0]
    slots, valid, N = _tokens(B, T, segment_ids, cu_seqlens)
    states = jnp.zeros((N, W - 1, D), dtype) if initial_state is None else initial_state.astype(dtype)
    if slots is not None:
        states = jnp.concatenate([states, jnp.zeros((1, W - 1, D), dtype)])
    weight, bias = weight.astype(dtype), jnp.zeros(D, dtype) if bias is None else bias.astype(dtype)
    x = jnp.where(valid[..., None], x.astype(dtype), 0)

    def step(carry, token):
        states, last_id = carry
        x, valid, segment_id, slot = token
        S = states if slot is None else states[slot][None]
        if segment_id is not None:
            starts = (segment_id != 0) & (last_id != 0) & (segment_id != last_id)
            S = jnp.where(starts[:, None, None], 0, S)
            last_id = jnp.where(segment_id != 0, segment_id, last_id)
        window = jnp.concatenate([S, x[:, None]], axis=1)
        y = jnp.sum(weight * window, axis=1) + bias
        S = jnp.where(valid[:, None, None], window[:, 1:], S)
        states = S if slot is None else states.at[slot].set(S[0])
        return (states, last_id), y

    tokens = [None if y is None else jnp.moveaxis(y, 1, 0) for y in (x, jnp.broadcast_to(valid, (B, T)), segment_ids)]
    last_id = None if segment_ids is None else jnp.zeros_like(segment_ids, shape=(B,))
    (states, _), y = _scan(step, (states, last_id), (*tokens, slots), T)
    y = jnp.moveaxis(y, 0, 1)
    if activation is not None:
        y = y / (1 + jnp.exp(-y))
    return jnp.where(valid[..., None], y, 0), states[:N] if return_final_state else None


def _check(function: str, dtype: DTypeLike, segment_ids: Array | None, cu_seqlens: Array | None) -> None:
    if jax.dtypes.canonicalize_dtype(dtype) != jnp.dtype(dtype):
        raise ValueError(f"{function}: dtype must be enabled by jax_enable_x64, got {jnp.dtype(dtype).name}")
    if segment_ids is not None and cu_seqlens is not None:
        raise ValueError(f"{function}: cu_seqlens must come without segment_ids, got both")


def _tokens(B: int, T: int, segment_ids: Array | None, cu_seqlens: Array | None) -> tuple[Array | None, Array, int]:
    """Of each token the state it works on, where a row has several, and whether it is no padding; how many sequences.

    One more state is there for padding.
    """
    if cu_seqlens is not None:
        slots = jnp.searchsorted(cu_seqlens, jnp.arange(T), side="right") - 1
        return slots, (jnp.arange(T) < cu_seqlens[-1])[None], len(cu_seqlens) - 1
    if segment_ids is not None:
        return None, segment_ids != 0, B
    return None, jnp.ones((B, T), bool), B


def _l2norm(x: Array) -> Array:
    return x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)


def _scan(step, carry, tokens, length: int):
    """`lax.scan` whose gradient keeps the carry at about sqrt(length) places and recomputes what lies between."""
    inner = max(1, math.isqrt(length))
    head = length - length % inner
    carry, out = lax.scan(
        jax.checkpoint(lambda carry, block: lax.scan(step, carry, block)),
        carry,
        jax.tree.map(lambda x: x[:head].reshape(head // inner, inner, *x.shape[1:]), tokens),
    )
    out = out.reshape(head, *out.shape[2:])
    carry, rest = lax.scan(step, carry, jax.tree.map(lambda x: x[head:], tokens))
    return carry, jnp.concatenate([out, rest])
