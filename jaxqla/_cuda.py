"""The kernel path: packs the rows, marks padding and resets, and launches the kernels.

The kernels see one packed axis of `NT` tokens with the boundaries of `N` sequences, whatever form the call has. A chunk
is 64 tokens counted from the start of its sequence; chunk `c` of sequence `n` has slot `cu_seqlens[n] // 64 + n + c`,
so that `NC = NT // 64 + N` slots hold the chunks of any boundaries. Absent operands and results are arrays of size 0.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxqla import _launch, _math

CHUNK = 64
# Row flags, as in kernels/tiles.py.
_PAD, _TOKEN, _RESET = 0, 1, 2


class Packed(NamedTuple):
    """The boundaries of a call as the kernels read them."""

    cu_seqlens: Int[Array, " N+1"]
    row_flags: Int[Array, " NF"]  # of size 0 where every row is a token


def forward(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T HV V"],
    g: Float[Array, "B T HV"],
    beta: Float[Array, "B T HV"],
    initial_state: Float[Array, "N HV K V"] | None,
    segment_ids: Int[Array, "B T"] | None,
    cu_seqlens: Int[Array, " N+1"] | None,
    *,
    scale: float,
    qk_l2norm: bool,
    return_final_state: bool,
    inverse_kernel: str,
    fused_kernel: str,
) -> tuple[Float[Array, "B T HV V"], Float[Array, "N HV K V"] | None]:
    """Computes outputs and, where asked for, final states, by the kernels of these names.

    The arguments are those of `jaxqla.gated_delta`, after its checks; `g` and `beta` are float32, and no size is 0.
    """
    if qk_l2norm:
        q, k = _math.l2norm(q), _math.l2norm(k)
    B, T = v.shape[:2]
    packed = pack(B, T, segment_ids, cu_seqlens)
    q, k, v_rows, g, beta = (x.reshape(-1, *x.shape[2:]) for x in (q, k, v, g, beta))
    a, g_cum = chunk_inverse(k, g, beta, packed, kernel=inverse_kernel)
    o, final_state = fused_forward(
        q,
        k,
        v_rows,
        a,
        g_cum,
        packed,
        initial_state,
        scale=scale,
        return_final_state=return_final_state,
        kernel=fused_kernel,
    )
    return o.reshape(v.shape), final_state if return_final_state else None


def backward(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B T H K"],
    v: Float[Array, "B T HV V"],
    g: Float[Array, "B T HV"],
    beta: Float[Array, "B T HV"],
    initial_state: Float[Array, "N HV K V"] | None,
    segment_ids: Int[Array, "B T"] | None,
    cu_seqlens: Int[Array, " N+1"] | None,
    do: Float[Array, "B T HV V"],
    dfinal_state: Float[Array, "N HV K V"] | None,
    *,
    scale: float,
    qk_l2norm: bool,
    coupling_kernel: str,
    states_kernel: str,
    gradients_kernel: str,
) -> tuple[
    Float[Array, "B T H K"],
    Float[Array, "B T H K"],
    Float[Array, "B T HV V"],
    Float[Array, "B T HV"],
    Float[Array, "B T HV"],
    Float[Array, "N HV K V"] | None,
]:
    """Computes the gradients of q, k, v, g, beta and initial_state, by the kernels of these names.

    The first arguments are those of `forward`, the last two the cotangents of what it returns. Gradients have the dtype
    of their argument and are exactly 0 at padding.
    """
    B, T = v.shape[:2]
    NT = B * T
    packed = pack(B, T, segment_ids, cu_seqlens)
    is_token = None  # all are
    if segment_ids is not None:
        is_token = segment_ids.reshape(-1) != 0
    elif cu_seqlens is not None:
        is_token = jnp.arange(NT) < cu_seqlens[-1]

    def of_tokens(x: Float[Array, "NT *rest"]) -> Float[Array, "NT *rest"]:
        return x if is_token is None else jnp.where(is_token.reshape(-1, *(1,) * (x.ndim - 1)), x, 0)

    q_rows, k_rows, v_rows, g, beta, do = (x.reshape(NT, *x.shape[2:]) for x in (q, k, v, g, beta, do))
    through_q = through_k = None
    if qk_l2norm:
        # Padding may hold anything, of which the norm has no finite gradient.
        q_rows, through_q = jax.vjp(_math.l2norm, of_tokens(q_rows))
        k_rows, through_k = jax.vjp(_math.l2norm, of_tokens(k_rows))
    y, g_cum = chunk_inverse(k_rows, g, beta, packed, kernel=coupling_kernel)
    states = backward_states(
        q_rows,
        k_rows,
        v_rows,
        do,
        y,
        g_cum,
        beta,
        packed,
        initial_state,
        dfinal_state,
        scale=scale,
        kernel=states_kernel,
    )
    dq, dk, dg, dbeta = backward_gradients(
        q_rows, k_rows, do, states, g_cum, beta, packed, scale=scale, kernel=gradients_kernel
    )
    if through_q is not None and through_k is not None:
        (dq,), (dk,) = through_q(dq), through_k(dk)
    dg, dbeta = of_tokens(dg), of_tokens(dbeta)
    return (
        dq.reshape(q.shape),
        dk.reshape(k.shape),
        states.dv.reshape(v.shape),
        dg.reshape(B, T, -1),
        dbeta.reshape(B, T, -1),
        None if initial_state is None else states.dinitial_state,
    )


def pack(B: int, T: int, segment_ids: Int[Array, "B T"] | None, cu_seqlens: Int[Array, " N+1"] | None) -> Packed:
    """Gives the sequences of B rows of T tokens as boundaries of one packed row, and the flags of its tokens."""
    if cu_seqlens is None:
        cu_seqlens = jnp.asarray(np.arange(B + 1, dtype=np.int32) * np.int32(T))
    if segment_ids is None:
        return Packed(cu_seqlens, jnp.zeros(0, jnp.int32))
    return Packed(cu_seqlens, _row_flags(segment_ids).reshape(-1))


def _row_flags(segment_ids: Int[Array, "B T"]) -> Int[Array, "B T"]:
    is_token, resets = _math.tokens_and_resets(segment_ids)
    return jnp.where(is_token, jnp.where(resets, _RESET, _TOKEN), _PAD).astype(jnp.int32)


def chunk_inverse(
    k: Float[Array, "NT H K"],
    g: Float[Array, "NT HV"],
    beta: Float[Array, "NT HV"],
    packed: Packed,
    *,
    kernel: str,
) -> tuple[Float[Array, "NC HV C C"], Float[Array, "NC HV C"]]:
    """Launches the kernel of the inverse or of the coupling.

    Returns:
        With `M` the gated strict lower triangle of `k k^T` of each chunk, `(I + diag(beta) M)^-1 diag(beta)` from the
        inverse kernel or `M (I + diag(beta) M)^-1` from the coupling kernel, in the dtype of k; and the sums of the
        gates in each chunk, in base 2.
    """
    NT, HV = g.shape
    NC = NT // CHUNK + packed.cu_seqlens.shape[0] - 1
    out, g_cum = _launch.launch(
        kernel,
        (k, g, beta, *packed),
        (
            jax.ShapeDtypeStruct((NC, HV, CHUNK, CHUNK), k.dtype),
            jax.ShapeDtypeStruct((NC, HV, CHUNK), jnp.float32),
        ),
    )
    return out, g_cum


class States(NamedTuple):
    """What the state passes of the backward leave for the chunk-parallel gradients; states are transposed."""

    states: Float[Array, "NC HV V K"]  # that enter a chunk
    errors: Float[Array, "NC HV C V"]  # of the delta rule
    dstates: Float[Array, "NC HV V K"]  # cotangents of those that leave a chunk
    derrors: Float[Array, "NC HV C V"]  # cotangents of beta times the errors
    dv: Float[Array, "NT HV V"]
    dinitial_state: Float[Array, "N HV K V"]  # of size 0 without an initial state


def backward_states(
    q: Float[Array, "NT H K"],
    k: Float[Array, "NT H K"],
    v: Float[Array, "NT HV V"],
    do: Float[Array, "NT HV V"],
    y: Float[Array, "NC HV C C"],
    g_cum: Float[Array, "NC HV C"],
    beta: Float[Array, "NT HV"],
    packed: Packed,
    initial_state: Float[Array, "N HV K V"] | None,
    dfinal_state: Float[Array, "N HV K V"] | None,
    *,
    scale: float,
    kernel: str,
) -> States:
    """Launches the state passes, forward for the states and back for their cotangents."""
    NC, HV, C, _ = y.shape
    K, V = k.shape[-1], v.shape[-1]
    none = jnp.zeros((0, HV, K, V), jnp.float32)
    initial_state = none if initial_state is None else initial_state
    dfinal_state = none if dfinal_state is None else dfinal_state
    of_states, of_rows = (jax.ShapeDtypeStruct((NC, HV, rows, columns), v.dtype) for rows, columns in ((V, K), (C, V)))
    results = _launch.launch(
        kernel,
        (q, k, v, do, y, g_cum, beta, *packed, initial_state, dfinal_state),
        (
            of_states,
            of_rows,
            of_states,
            of_rows,
            jax.ShapeDtypeStruct(v.shape, v.dtype),
            jax.ShapeDtypeStruct(initial_state.shape, jnp.float32),
        ),
        scalars={"scale": np.float32(scale)},
    )
    return States(*results)


def backward_gradients(
    q: Float[Array, "NT H K"],
    k: Float[Array, "NT H K"],
    do: Float[Array, "NT HV V"],
    states: States,
    g_cum: Float[Array, "NC HV C"],
    beta: Float[Array, "NT HV"],
    packed: Packed,
    *,
    scale: float,
    kernel: str,
) -> tuple[Float[Array, "NT H K"], Float[Array, "NT H K"], Float[Array, "NT HV"], Float[Array, "NT HV"]]:
    """Launches the chunk-parallel gradients of q, k, g and beta; those of g and beta are not written at padding."""
    dq, dk, dg, dbeta = _launch.launch(
        kernel,
        (q, k, do, states.states, states.errors, states.dstates, states.derrors, g_cum, beta, *packed),
        tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k, beta, beta)),
        scalars={"scale": np.float32(scale)},
    )
    return dq, dk, dg, dbeta


def fused_forward(
    q: Float[Array, "NT H K"],
    k: Float[Array, "NT H K"],
    v: Float[Array, "NT HV V"],
    a: Float[Array, "NC HV C C"],
    g_cum: Float[Array, "NC HV C"],
    packed: Packed,
    initial_state: Float[Array, "N HV K V"] | None,
    *,
    scale: float,
    return_final_state: bool,
    kernel: str,
) -> tuple[Float[Array, "NT HV V"], Float[Array, "N HV K V"]]:
    """Launches the state and output kernel; without a final state that result has size 0."""
    N = packed.cu_seqlens.shape[0] - 1
    HV, V = v.shape[1:]
    state = (HV, k.shape[-1], V)
    if initial_state is None:
        initial_state = jnp.zeros((0, *state), jnp.float32)
    o, final_state = _launch.launch(
        kernel,
        (q, k, v, a, g_cum, *packed, initial_state),
        (
            jax.ShapeDtypeStruct(v.shape, v.dtype),
            jax.ShapeDtypeStruct((N if return_final_state else 0, *state), jnp.float32),
        ),
        scalars={"scale": np.float32(scale)},
    )
    return o, final_state
