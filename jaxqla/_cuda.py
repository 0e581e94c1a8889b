"""The kernel path: packs the rows, marks padding and resets, and launches the kernels of the forward.

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
    """Launches the inverse kernel.

    Returns:
        The inverse of each chunk times `diag(beta)`, gates included, in the dtype of k, and the sums of the gates in
        each chunk, in base 2.
    """
    NT, HV = g.shape
    NC = NT // CHUNK + packed.cu_seqlens.shape[0] - 1
    a, g_cum = _launch.launch(
        kernel,
        (k, g, beta, *packed),
        (
            jax.ShapeDtypeStruct((NC, HV, CHUNK, CHUNK), k.dtype),
            jax.ShapeDtypeStruct((NC, HV, CHUNK), jnp.float32),
        ),
    )
    return a, g_cum


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
