"""The chunked path in plain JAX: exact, for any device, any widths and any of the input dtypes.

Tokens are taken `C` at a time (64, fewer where there are fewer). With `G_ij` the sum of the log gates of a chunk after
token `j` up to token `i`, `D_ij = exp(G_ij)` for `i >= j` and 0 elsewhere, `b_i` and `a_j` the decays from the start of
the chunk to token `i` and from token `j` to its end, and `S` the state that enters the chunk:

    A   = strictLower(K K^T) o D
    e   = (I + A diag(beta))^-1 (V - diag(b) K S)           errors, what the delta rule corrects
    u   = diag(beta) e
    O   = scale (diag(b) Q S + (lower(Q K^T) o D) u)
    S'  = b_C S + K^T diag(a) u

A scan over the chunks finds the states and errors; all that comes before and after is computed for all chunks at once.
A chunk belongs to one row or, with `cu_seqlens`, to one sequence; a reset of the state inside a chunk is a gate whose
exponential is 0. Arrays of a head are grouped by key head, `H R` with `R = HV // H`, so that q and k are never
repeated.

The backward finds the states and errors again, walks back for the cotangents of the states, and computes the rest for
all chunks at once. It keeps two states a chunk, in the dtype of operands.

Numerics: the state, the gates and every sum are float32. Operands of products are rounded to bfloat16 for bfloat16
inputs, except on CPUs, where that gains nothing. Otherwise they are float32, multiplied in the precision of
`jax.default_matmul_precision`: the state of float16 inputs may be out of the range of float16. Every `G_ij` is a sum of
its own, never a difference of cumulative sums, so a strong gate does not blur its neighbours; for the same reason the
gradient of a gate is summed from the entries of `D` that it is part of.
"""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Shaped

from jaxqla import _math

CHUNK = 64
# Blocks of the triangular inverse that are solved by substitution; larger ones are merged from them.
BLOCK = 8
# exp(-111) is 0 in float32, denormal numbers included. A gate below it does what it does, and sums of gates stay
# finite whatever the gates are.
MIN_LOG_GATE = -111.0


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
) -> tuple[Float[Array, "B T HV V"], Float[Array, "N HV K V"]]:
    """Computes outputs, in the dtype of `v`, and final states, float32.

    The arguments are those of `jaxqla.gated_delta`, after its checks; `g` and `beta` are float32.
    """
    layout = _Layout.of(v.shape[1], segment_ids, cu_seqlens)
    states = _group_states(q, v, initial_state, cu_seqlens)
    if 0 in (layout.num_chunks, states.size):
        return jnp.zeros_like(v), _ungroup_states(states)
    x = _Inputs.of(layout, q, k, v, g, beta, qk_l2norm)
    c = _Chunks.of(x)
    states, S, e = _walk(states, x, c, layout.sequence)
    u = c.gates.beta * e
    p = c.qk[:, :, :, None] * c.decay
    o = c.gates.decay_in * x.dot("nbhck,nbhkrv->nbhcrv", x.q, S) + x.dot("nbhrcd,nbhdrv->nbhcrv", p, u)
    return layout.join(_ungroup(scale * o)).astype(v.dtype), _ungroup_states(states)


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
) -> tuple[
    Float[Array, "B T H K"],
    Float[Array, "B T H K"],
    Float[Array, "B T HV V"],
    Float[Array, "B T HV"],
    Float[Array, "B T HV"],
    Float[Array, "N HV K V"] | None,
]:
    """Computes the gradients of q, k, v, g, beta and initial_state from the cotangents of what `forward` returns.

    Each has the dtype of its argument and is exactly 0 at padding. Without an initial state its gradient is None.
    """
    layout = _Layout.of(v.shape[1], segment_ids, cu_seqlens)
    states = _group_states(q, v, initial_state, cu_seqlens)
    dstates = _group_states(q, v, dfinal_state, cu_seqlens)
    if 0 in (layout.num_chunks, states.size):
        dq, dk, dv, dg, dbeta = map(jnp.zeros_like, (q, k, v, g, beta))
        return dq, dk, dv, dg, dbeta, None if initial_state is None else _ungroup_states(dstates)
    x = _Inputs.of(layout, q, k, v, g, beta, qk_l2norm)
    c = _Chunks.of(x)
    _, S, e = _walk(states, x, c, layout.sequence)
    a, p = (y[:, :, :, None] * c.decay for y in (c.kk, c.qk))
    u = c.gates.beta * e
    do = _group(layout.split(do), q.shape[2])
    dread = scale * c.gates.decay_in * do  # of Q S
    du = scale * x.dot("nbhrcd,nbhcrv->nbhdrv", p, do)  # through the outputs of the chunk
    dstates, dS, dwrite, de = _walk_back(dstates, x, c, layout.sequence, dread, du)
    derase = -c.gates.decay_in * de  # of K S

    # e = V - diag(b) K S - A u, so u has a gradient through later errors too.
    dbeta = jnp.sum((du + dwrite - x.dot("nbhrcd,nbhcrv->nbhdrv", jnp.tril(a, -1), de)) * e, axis=-1)
    da = jnp.tril(-x.dot("nbhcrv,nbhdrv->nbhrcd", de, u), -1)
    dp = jnp.tril(scale * x.dot("nbhcrv,nbhdrv->nbhrcd", do, u))
    dkk, dqk = (jnp.sum(y * c.decay, axis=3) for y in (da, dp))
    dq = x.dot("nbhcrv,nbhkrv->nbhck", dread, S) + x.dot("nbhcd,nbhdk->nbhck", dqk, x.k)
    dk = (
        x.dot("nbhcrv,nbhkrv->nbhck", derase, S)
        + x.dot("nbhcrv,nbhkrv->nbhck", c.gates.decay_out * u, dS)
        + x.dot("nbhcd,nbhck->nbhdk", dqk, x.q)
        + x.dot("nbhcd,nbhdk->nbhck", dkk + dkk.mT, x.k)
    )
    if qk_l2norm:
        dq, dk = _through_l2norm(layout.split(q), dq), _through_l2norm(layout.split(k), dk)

    read, erase = (x.dot("nbhck,nbhkrv->nbhcrv", y, S) for y in (x.q, x.k))
    dg = _through_exponents(
        jnp.tril(da * a + dp * p, -1),
        jnp.sum(read * dread + erase * derase, axis=-1),
        jnp.sum(u * dwrite, axis=-1),
        jnp.sum(c.gates.decay_all * S * dS, axis=(-3, -1)),
    )
    return (
        layout.join(dq.swapaxes(2, 3)).astype(q.dtype),
        layout.join(dk.swapaxes(2, 3)).astype(k.dtype),
        layout.join(_ungroup(de)).astype(v.dtype),
        layout.join(_ungroup(dg)),
        layout.join(_ungroup(dbeta)),
        None if initial_state is None else _ungroup_states(dstates),
    )


def _walk(states: Array, x: "_Inputs", c: "_Chunks", sequence: Array | None) -> tuple[Array, Array, Array]:
    """Passes the states through the chunks.

    Returns the final states and, for each chunk, the state that enters it and its errors `e`.
    """

    def step(states, chunk):
        k, v, inverse, gates, sequence = chunk
        S = _read(states, sequence)
        e = x.dot("bhrcd,bhdrv->bhcrv", inverse, v - gates.decay_in * x.dot("bhck,bhkrv->bhcrv", k, S))
        S_next = gates.decay_all * S + x.dot("bhck,bhcrv->bhkrv", k, gates.decay_out * gates.beta * e)
        return _write(states, sequence, S_next), (S.astype(x.operand), e)

    states, (S, e) = lax.scan(step, states, (x.k, x.v, c.inverse, c.gates, sequence))
    return states, S, e


def _walk_back(
    dstates: Array, x: "_Inputs", c: "_Chunks", sequence: Array | None, dread: Array, du: Array
) -> tuple[Array, Array, Array, Array]:
    """Passes the cotangents of the states back through the chunks.

    Returns those of the initial states and, for each chunk, those of the state that leaves it, of `u` through that
    state, and of `e`.
    """
    C = x.q.shape[3]

    def step(dstates, chunk):
        qk, inverse, gates, sequence, dread, du = chunk
        dS = _read(dstates, sequence)
        dwrite = gates.decay_out * x.dot("bhck,bhkrv->bhcrv", qk[:, :, C:], dS)
        de = x.dot("bhrcd,bhcrv->bhdrv", inverse, gates.beta * (du + dwrite))
        dreads = jnp.concatenate([dread, -gates.decay_in * de], axis=2)
        dS_before = gates.decay_all * dS + x.dot("bhck,bhcrv->bhkrv", qk, dreads)
        return _write(dstates, sequence, dS_before), (dS.astype(x.operand), dwrite, de)

    qk = jnp.concatenate([x.q, x.k], axis=3)
    chunks = (qk, c.inverse, c.gates, sequence, dread, du)
    dstates, (dS, dwrite, de) = lax.scan(step, dstates, chunks, reverse=True)
    return dstates, dS, dwrite, de


# -- what needs no state -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Inputs:
    """The inputs by chunks, masked; `operand` is the dtype that operands of products need, and are kept in."""

    operand: DTypeLike
    q: Float[Array, "NC B H C K"]
    k: Float[Array, "NC B H C K"]
    v: Float[Array, "NC B H C R V"]
    g: Float[Array, "NC B H C R"]
    beta: Float[Array, "NC B H C R"]

    @staticmethod
    def of(layout, q, k, v, g, beta, qk_l2norm) -> "_Inputs":
        H = q.shape[2]
        operand = jnp.bfloat16 if q.dtype == jnp.bfloat16 else jnp.float32
        q, k, v, g, beta = (layout.split(x) for x in (q, k, v, g, beta))
        if qk_l2norm:
            q, k = _math.l2norm(q), _math.l2norm(k)
        g = jnp.maximum(g, MIN_LOG_GATE)
        if layout.resets is not None:
            g = jnp.where(layout.split(layout.resets)[..., None], MIN_LOG_GATE, g)
        q, k = (x.swapaxes(2, 3) for x in (q, k))
        return _Inputs(operand, q, k, *(_group(x, H) for x in (v, g, beta)))

    def dot(self, axes: str, a: Array, b: Array) -> Array:
        """Products of matrices, summed in float32."""

        def product(a: Array, b: Array) -> Array:
            return jnp.einsum(axes, a, b, preferred_element_type=jnp.float32)

        def rounded(a: Array, b: Array) -> Array:
            return product(a.astype(jnp.bfloat16), b.astype(jnp.bfloat16))

        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        if self.operand != jnp.bfloat16:
            return product(a, b)
        return lax.platform_dependent(a, b, cpu=product, default=rounded)


class _Gates(NamedTuple):
    """Factors of the rows of a chunk, and of its state."""

    beta: Float[Array, "NC B H C R 1"]
    decay_in: Float[Array, "NC B H C R 1"]  # b
    decay_out: Float[Array, "NC B H C R 1"]  # a
    decay_all: Float[Array, "NC B H 1 R 1"]  # b_C


class _Chunks(NamedTuple):
    """What the inputs say of each chunk, before its state is known."""

    decay: Float[Array, "NC B H R C C"]  # D
    kk: Float[Array, "NC B H C C"]
    qk: Float[Array, "NC B H C C"]
    inverse: Float[Array, "NC B H R C C"]  # (I + A diag(beta))^-1
    gates: _Gates

    @staticmethod
    def of(x: _Inputs) -> "_Chunks":
        exponents = _exponents(x.g.mT)
        decay = jnp.tril(jnp.exp(exponents))
        kk, qk = (x.dot("nbhck,nbhdk->nbhcd", y, x.k) for y in (x.k, x.q))
        inverse = _inverse(jnp.tril(kk[:, :, :, None] * decay * x.beta.mT[..., None, :], -1))
        decay_in = jnp.exp(jnp.cumsum(x.g, axis=-2))[..., None]
        decay_out = jnp.exp(exponents[..., -1, :]).mT[..., None]
        gates = _Gates(x.beta[..., None], decay_in, decay_out, decay_in[..., -1:, :, :])
        return _Chunks(decay, kk, qk, inverse.astype(x.operand), gates)


def _exponents(g: Float[Array, "*heads C"]) -> Float[Array, "*heads C C"]:
    """Sums of the log gates after token `j` (last axis) up to token `i`; 0 for `i <= j`."""
    after = jnp.tril(jnp.broadcast_to(g[..., None], (*g.shape, g.shape[-1])), -1)
    return _full_precision("ij,...jk->...ik", _ones_up_to(g.shape[-1]), after)


def _through_exponents(
    ddecay: Float[Array, "*heads R C C"],
    din: Float[Array, "*heads C R"],
    dout: Float[Array, "*heads C R"],
    dall: Float[Array, "*heads R"],
) -> Float[Array, "*heads C R"]:
    """Gradients of the log gates from those of the exponents in D, b, a and b_C."""
    # The exponents of `a` are those of the last row of D.
    ddecay = ddecay.at[..., -1, :].add(dout.mT)
    later = _full_precision("ij,...ik->...jk", _ones_up_to(ddecay.shape[-1]), ddecay)
    dg = jnp.sum(jnp.tril(later, -1), axis=-1).mT
    return dg + lax.cumsum(din, axis=din.ndim - 2, reverse=True) + dall[..., None, :]


def _ones_up_to(size: int) -> np.ndarray:
    return np.tril(np.ones((size, size), np.float32))


def _through_l2norm(x: Float[Array, "NC B C H K"], dy: Float[Array, "NC B H C K"]) -> Float[Array, "NC B H C K"]:
    """The gradient of `x` from that of its normalised form, in float32."""
    _, vjp = jax.vjp(_math.l2norm, x.swapaxes(2, 3).astype(jnp.float32))
    return vjp(dy)[0]


def _inverse(lower: Float[Array, "*heads C C"]) -> Float[Array, "*heads C C"]:
    """`(I + lower)^-1` of strictly lower triangular matrices, by blocks."""
    # Heads along one axis: on CPUs jaxlib 0.10 crashes in the sum of `substitute` with seven axes, one of size 1.
    shape, C = lower.shape, lower.shape[-1]
    lower = lower.reshape(-1, C, C)
    size = min(BLOCK, C)

    def blocks(first_row: int, step: int) -> Float[Array, "*heads _ size size"]:
        starts = range(0, C, step)
        return jnp.stack([lower[..., i + first_row : i + first_row + size, i : i + size] for i in starts], axis=-3)

    diagonal = blocks(0, size)

    def substitute(i, inverse):
        row = lax.dynamic_index_in_dim(diagonal, i, axis=diagonal.ndim - 2, keepdims=False)
        return inverse.at[..., i, :].add(-jnp.sum(row[..., None] * inverse, axis=-2))

    inverse = jnp.broadcast_to(jnp.eye(size, dtype=lower.dtype), diagonal.shape)
    inverse = lax.fori_loop(1, size, substitute, _math.vary_like(inverse, lower))
    while size < C:
        # [[X, 0], [L, Z]]^-1 = [[X^-1, 0], [-Z^-1 L X^-1, Z^-1]]
        x, z = inverse[..., ::2, :, :], inverse[..., 1::2, :, :]
        corner = _full_precision("...ij,...jk->...ik", z, blocks(size, 2 * size))
        corner = -_full_precision("...ij,...jk->...ik", corner, x)
        inverse = jnp.block([[x, jnp.zeros_like(x)], [corner, z]])
        size *= 2
    return inverse.reshape(shape)


_full_precision = functools.partial(jnp.einsum, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


# -- heads and states --------------------------------------------------------------------------------------------------


def _group(x: Float[Array, "NC B C HV *W"], H: int) -> Float[Array, "NC B H C R *W"]:
    return jnp.moveaxis(x.reshape(*x.shape[:3], H, x.shape[3] // H, *x.shape[4:]), 3, 2)


def _ungroup(x: Float[Array, "NC B H C R *W"]) -> Float[Array, "NC B C HV *W"]:
    return jnp.moveaxis(x, 2, 3).reshape(*x.shape[:2], x.shape[3], x.shape[2] * x.shape[4], *x.shape[5:])


def _group_states(q, v, states: Float[Array, "N HV K V"] | None, cu_seqlens) -> Float[Array, "N H K R V"]:
    """States by key head, zero where there are none."""
    B, _, H, K = q.shape
    HV, V = v.shape[2:]
    N = B if cu_seqlens is None else len(cu_seqlens) - 1
    if states is None:
        return _math.vary_like(jnp.zeros((N, H, K, HV // H, V), jnp.float32), v)
    return states.astype(jnp.float32).reshape(N, H, HV // H, K, V).swapaxes(2, 3)


def _ungroup_states(states: Float[Array, "N H K R V"]) -> Float[Array, "N HV K V"]:
    N, H, K, R, V = states.shape
    return states.swapaxes(2, 3).reshape(N, H * R, K, V)


def _read(states: Float[Array, "N H K R V"], sequence: Int[Array, ""] | None) -> Float[Array, "B H K R V"]:
    """The states that a chunk works on: of all rows, or of its sequence."""
    return states if sequence is None else lax.dynamic_index_in_dim(states, sequence, keepdims=True)


def _write(states, sequence, S):
    return S if sequence is None else lax.dynamic_update_index_in_dim(states, S, sequence, 0)


# -- from tokens to chunks and back ------------------------------------------------------------------------------------


class _Slots(NamedTuple):
    """With `cu_seqlens`, of each chunk: its sequence, its tokens, which of those are its own; of each token: its place
    among those of all chunks."""

    sequence: Int[Array, " NC"]
    tokens: Int[Array, "NC C"]
    own: Bool[Array, "NC C"]
    places: Int[Array, " T"]


@dataclass(frozen=True)
class _Layout:
    """Where the tokens of a call are in its chunks, `NC B C`; with `cu_seqlens`, `B` is 1."""

    num_tokens: int
    size: int
    num_chunks: int
    # Of the tokens: which are none of padding, and which of them start from a state of zero.
    valid: Bool[Array, "B T"] | None = None
    resets: Bool[Array, "B T"] | None = None
    slots: "_Slots | None" = None

    @property
    def sequence(self) -> Int[Array, " NC"] | None:
        return None if self.slots is None else self.slots.sequence

    @staticmethod
    def of(T: int, segment_ids: Int[Array, "B T"] | None, cu_seqlens: Int[Array, " N+1"] | None) -> "_Layout":
        # Below CHUNK a single chunk: any size up to BLOCK, above it what blocks merge to.
        size = max(T, 1) if T <= BLOCK else next((n for n in (2 * BLOCK, 4 * BLOCK) if n >= T), CHUNK)
        if cu_seqlens is not None:
            return _Layout._of_sequences(T, size, cu_seqlens)
        num_chunks = -(-T // size)
        if segment_ids is None:
            return _Layout(T, size, num_chunks)
        return _Layout(T, size, num_chunks, *_math.tokens_and_resets(segment_ids))

    @staticmethod
    def _of_sequences(T: int, size: int, cu_seqlens: Int[Array, " N+1"]) -> "_Layout":
        N = len(cu_seqlens) - 1
        if 0 in (T, N):
            return _Layout(T, size, 0)
        # The chunks of sequence n are those from first[n] on: T // size + N suffice, whatever the boundaries.
        first = cu_seqlens[:-1] // size + np.arange(N, dtype=np.int32)
        num_chunks = T // size + N
        chunks = np.arange(num_chunks, dtype=np.int32)
        sequence = _last_at_or_before(first, chunks)
        tokens = (cu_seqlens[sequence] + (chunks - first[sequence]) * size)[:, None] + np.arange(size, dtype=np.int32)
        own = tokens < cu_seqlens[sequence + 1][:, None]
        positions = np.arange(T, dtype=np.int32)
        of_token = _last_at_or_before(cu_seqlens[:-1], positions)
        places = first[of_token] * size + positions - cu_seqlens[of_token]
        valid = (cu_seqlens[-1] > positions)[None]
        return _Layout(T, size, num_chunks, valid, slots=_Slots(sequence, tokens, own, places))

    def split(self, x: Shaped[Array, "B T *W"]) -> Shaped[Array, "NC B C *W"]:
        """Tokens to chunks, with zeros where there is no token and at padding, whatever that holds."""
        if self.slots is not None:
            x = jnp.take(x[0], self.slots.tokens, axis=0, mode="clip")
            return _keep(self.slots.own, x)[:, None]
        if self.valid is not None:
            x = _keep(self.valid, x)
        B, T = x.shape[:2]
        x = jnp.pad(x, ((0, 0), (0, self.num_chunks * self.size - T), *[(0, 0)] * (x.ndim - 2)))
        return x.reshape(B, self.num_chunks, self.size, *x.shape[2:]).swapaxes(0, 1)

    def join(self, x: Shaped[Array, "NC B C *W"]) -> Shaped[Array, "B T *W"]:
        """Chunks to tokens, with zeros at padding."""
        x = x.swapaxes(0, 1).reshape(x.shape[1], -1, *x.shape[3:])
        if self.slots is None:
            x = x[:, : self.num_tokens]
        else:
            x = jnp.take(x, self.slots.places, axis=1, mode="clip")
        return x if self.valid is None else _keep(self.valid, x)


def _last_at_or_before(starts: Int[Array, " N"], positions: Int[np.ndarray, " M"]) -> Int[Array, " M"]:
    """For each position the last of the ascending starts that is not after it."""
    return jnp.searchsorted(starts, positions, side="right", method="scan_unrolled") - 1


def _keep(mask: Array, x: Array) -> Array:
    """`x` where the mask of its leading axes is true, else 0."""
    return jnp.where(mask.reshape(*mask.shape, *[1] * (x.ndim - mask.ndim)), x, 0)
