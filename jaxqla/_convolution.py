"""The causal depthwise convolution in plain JAX.

With one sequence a row every tap is a shift of the tokens. With padding anywhere between them, and with several
sequences, a tap is a read: each token says where the token `i` before it in its sequence is, and, for the gradient,
each says where the token `i` after it is. Since no token is read twice by a tap, both directions are reads and nothing
is ever summed by a scatter.

A state enters through the first `W - 1` tokens of its sequence alone: what it adds to them is computed on its own.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Shaped

from jaxqla import _math, _slots


def forward(
    x: Float[Array, "B T D"],
    weight: Float[Array, "W D"],
    bias: Float[Array, " D"] | None,
    initial_state: Float[Array, "N W-1 D"] | None,
    segment_ids: Int[Array, "B T"] | None,
    cu_seqlens: Int[Array, " N+1"] | None,
    *,
    silu: bool,
) -> tuple[Float[Array, "B T D"], Float[Array, "N W-1 D"]]:
    """Computes outputs and final states, both in the dtype of `x`.

    The arguments are those of `jaxqla.causal_conv1d`, after its checks.
    """
    B, T, D = x.shape
    past = weight.shape[0] - 1
    N = B if cu_seqlens is None else len(cu_seqlens) - 1
    if 0 in (B, T, D, N):
        empty = jnp.zeros((N, past, D), x.dtype)
        return jnp.zeros_like(x), empty if initial_state is None else initial_state
    # The inputs are all that a gradient needs; without this it would keep a float32 copy of x for each tap.
    if segment_ids is None and cu_seqlens is None:
        body = jax.checkpoint(functools.partial(_shifts, silu=silu))
        return body(x, weight, bias, initial_state)
    body = jax.checkpoint(functools.partial(_reads, silu=silu))
    return body(x, weight, bias, initial_state, segment_ids, cu_seqlens)


def over_devices(
    axis: str,
    x: Float[Array, "B T D"],
    weight: Float[Array, "W D"],
    bias: Float[Array, " D"] | None,
    initial_state: Float[Array, "B W-1 D"] | None,
    segment_ids: Int[Array, "B T"] | None,
    *,
    silu: bool,
) -> tuple[Float[Array, "B T D"], Float[Array, "B W-1 D"]]:
    """The same inside a `shard_map` that splits the tokens over `axis`; the final state is that of the whole rows.

    Devices tell each other their last `W - 1` tokens, and each finds out what entered it.
    """
    B, T, D = x.shape
    past = weight.shape[0] - 1
    state = jnp.zeros((B, past, D), x.dtype) if initial_state is None else initial_state
    if 0 in x.shape:
        return jnp.zeros_like(x), state
    place, size = lax.axis_index(axis), lax.axis_size(axis)
    if segment_ids is None:
        tail = _last(x, jnp.zeros((B, past, D), x.dtype))
        pieces = _Pieces(counts=jnp.full((size, B), T, jnp.int32))
    else:
        tail = _read(x, _of_segments(segment_ids, past).leaving)
        pieces = _pieces(segment_ids, axis)
    tails = lax.all_gather(tail, axis)
    entering = state = _math.vary_like(state, tails)
    for piece in range(size):
        entering = jnp.where(place == piece, state, entering)
        older = _take_rows(state, pieces.counts[piece][:, None] + np.arange(past, dtype=np.int32))
        if pieces.begins is not None:
            older = _slots.keep(~pieces.begins[piece], older)
        state = tails[piece] + older  # one of which is zero
    if pieces.begins_first is not None:
        begins = lax.dynamic_index_in_dim(pieces.begins_first, place, keepdims=False)
        entering = _slots.keep(~begins, entering)
    y, _ = forward(x, weight, bias, entering, segment_ids, None, silu=silu)
    # The sum of one state and zeros is that state, and has the type of a result that all devices share.
    return y, lax.psum(jnp.where(place == size - 1, state, 0), axis)


def step(
    x: Float[Array, "B T D"],
    weight: Float[Array, "W D"],
    bias: Float[Array, " D"] | None,
    state: Float[Array, "P W-1 D"],
    state_indices: Int[Array, " B"] | None,
    valid_lengths: Int[Array, " B"] | None,
    *,
    silu: bool,
) -> tuple[Float[Array, "B T D"], Float[Array, "P W-1 D"], Float[Array, "B T W-1 D"]]:
    """Computes outputs, the new states or pool, and the state after each token.

    The arguments are those of `jaxqla.causal_conv1d_step`, after its checks.
    """
    T, past = x.shape[1], weight.shape[0] - 1
    is_token = _slots.tokens(T, state, state_indices, valid_lengths)
    last = _slots.read(state, state_indices)
    window = jnp.concatenate([last, x], axis=1)
    # Masked before anything is computed from them, so that no NaN reaches a result or a gradient.
    taps = [_slots.keep(is_token, tap) for tap in _windows(window, past)]
    y = _slots.keep(is_token, _finish(_weigh(weight, taps), bias, silu, x))
    states = []
    for t in range(T):
        after = window[:, t + 1 : t + 1 + past]
        last = after if is_token is None else jnp.where(is_token[:, t, None, None], after, last)
        states.append(last)
    return y, _slots.write(state, state_indices, last), jnp.stack(states, axis=1)


# -- one sequence a row ------------------------------------------------------------------------------------------------


def _shifts(x, weight, bias, initial_state, *, silu):
    T, past = x.shape[1], weight.shape[0] - 1
    y = _weigh(weight, [_shift(x, i) for i in range(past + 1)])
    if initial_state is None:
        initial_state = _math.vary_like(jnp.zeros((x.shape[0], past, x.shape[2]), x.dtype), x)
    else:
        entering = _entering(initial_state, weight)
        y += lax.pad(entering, np.float32(0), ((0, 0, 0), (0, T - past, 0), (0, 0, 0)))
    return _finish(y, bias, silu, x), _last(x, initial_state)


def _shift(x: Float[Array, "B T D"], i: int) -> Float[Array, "B T D"]:
    """For each token the one `i` before it, or 0."""
    i = min(i, x.shape[1])
    return jnp.pad(x, ((0, 0), (i, 0), (0, 0)))[:, : x.shape[1]]


def _last(x: Float[Array, "B T D"], state: Float[Array, "B W-1 D"]) -> Float[Array, "B W-1 D"]:
    """The last `W - 1` tokens, those of the state before those of `x`."""
    past = state.shape[1]
    return jnp.concatenate([state, x[:, -past:]], axis=1)[:, -past:]


# -- padding and several sequences -------------------------------------------------------------------------------------


class _Reads(NamedTuple):
    """For each place of the result, where its value is, and for each value, what its place is; -1 for none."""

    source: Int[Array, "B M"]
    target: Int[Array, "B L"]


class _Layout(NamedTuple):
    """Where taps and states find their tokens; the states of the sequences of a row lie one after the other."""

    is_token: Bool[Array, "B T"]
    taps: list[_Reads]  # from tokens to the tokens 1, 2, ... after them in their sequence
    entering: _Reads  # from states to the first tokens of their sequences
    leaving: _Reads  # from the last tokens of sequences to states
    kept: Int[Array, "B L"]  # of states, what remains of them in the final ones


def _reads(x, weight, bias, initial_state, segment_ids, cu_seqlens, *, silu):
    B, _, D = x.shape
    past = weight.shape[0] - 1
    layout = _of_segments(segment_ids, past) if cu_seqlens is None else _of_sequences(x.shape[1], cu_seqlens, past)
    y = _weigh(weight, [_slots.keep(layout.is_token, x), *(_read(x, reads) for reads in layout.taps)])
    states = _read(x, layout.leaving)
    if initial_state is not None:
        y += _read(_entering(initial_state, weight).reshape(B, -1, D), layout.entering)
        states += _take_rows(initial_state.reshape(B, -1, D), layout.kept)
    y = _slots.keep(layout.is_token, _finish(y, bias, silu, x))
    return y, states.reshape(-1, past, D)


def _of_segments(segment_ids: Int[Array, "B T"], past: int) -> _Layout:
    B, T = segment_ids.shape
    is_token, resets = _math.tokens_and_resets(segment_ids)
    index = lax.broadcasted_iota(jnp.int32, (B, T), 1)
    # Tokens are counted from 0, padding left out: over the row, and where the segment of a token begins.
    count = jnp.cumsum(is_token, axis=1, dtype=jnp.int32)
    number = count - 1
    begin = lax.cummax(jnp.where(resets, number, 0), axis=1)
    total, last_begin = count[:, -1:], begin[:, -1:]
    before = _shift_indices(lax.cummax(jnp.where(is_token, index, -1), axis=1), 1)
    after = _shift_indices(lax.cummin(jnp.where(is_token, index, T), axis=1, reverse=True), -1)

    taps, source, target = [], index, index
    for i in range(1, past + 1):
        source = _take(before, source, -1)
        target = _take(after, target, T)
        taps.append(
            _Reads(
                jnp.where(is_token & (number - begin >= i), source, -1),
                jnp.where(is_token & (_take(number - begin, target, -1) >= i), target, -1),
            )
        )

    def where_is(numbers: Array, wanted: Array) -> Array:
        """The indices of tokens by their numbers, -1 for those that are not wanted."""
        found = (number[:, None] == numbers[..., None]) & is_token[:, None]
        return jnp.where(wanted & jnp.any(found, axis=-1), jnp.argmax(found, axis=-1).astype(jnp.int32), -1)

    slots = jnp.broadcast_to(np.arange(past, dtype=np.int32), (B, past))
    numbers = total - past + slots
    place = number - (total - past)
    first = is_token & (begin == 0)
    entering = _Reads(
        jnp.where(first & (number < past), number, -1),
        where_is(slots, _take(begin, where_is(slots, jnp.bool_(True)), -1) == 0),
    )
    leaving = _Reads(
        where_is(numbers, numbers >= last_begin),
        jnp.where(is_token & (begin == last_begin) & (place >= 0), place, -1),
    )
    kept = jnp.where((last_begin == 0) & (numbers < 0), numbers + past, -1)
    return _Layout(is_token, taps, entering, leaving, kept)


def _of_sequences(T: int, cu_seqlens: Int[Array, " N+1"], past: int) -> _Layout:
    index = np.arange(T, dtype=np.int32)
    begins, ends = cu_seqlens[:-1], cu_seqlens[1:]
    # The last sequence that begins at or before a token, so never an empty one.
    sequence = jnp.searchsorted(begins, index, side="right", method="scan_unrolled").astype(jnp.int32) - 1
    is_token = cu_seqlens[-1] > index
    place, left = index - begins[sequence], ends[sequence] - index
    taps = [
        _Reads(
            jnp.where(is_token & (place >= i), index - i, -1)[None],
            jnp.where(is_token & (left > i), index + i, -1)[None],
        )
        for i in range(1, past + 1)
    ]
    slots = np.arange(past, dtype=np.int32)
    own = np.arange(begins.shape[0], dtype=np.int32)[:, None] * past
    heads, tails = begins[:, None] + slots, ends[:, None] - past + slots
    short = tails - begins[:, None] + past  # of the state, what is not pushed out of it
    entering = _Reads(
        jnp.where(is_token & (place < past), sequence * past + place, -1)[None],
        jnp.where(heads < ends[:, None], heads, -1).reshape(1, -1),
    )
    leaving = _Reads(
        jnp.where(tails >= begins[:, None], tails, -1).reshape(1, -1),
        jnp.where(is_token & (left <= past), sequence * past + past - left, -1)[None],
    )
    kept = jnp.where(short < past, own + short, -1).reshape(1, -1)
    return _Layout(is_token[None], taps, entering, leaving, kept)


def _read(x: Float[Array, "B L D"], reads: _Reads) -> Float[Array, "B M D"]:
    # In a shard_map a state that is the same on all devices may be read at places that are not.
    return _read_varying(_math.vary_like(x, reads.source), reads)


@jax.custom_vjp
def _read_varying(x: Float[Array, "B L D"], reads: _Reads) -> Float[Array, "B M D"]:
    return _take_rows(x, reads.source)


_read_varying.defvjp(
    lambda x, reads: (_read_varying(x, reads), reads),
    lambda reads, dy: (_read_varying(dy, _Reads(reads.target, reads.source)), None),
)


# -- tokens split over devices -----------------------------------------------------------------------------------------


class _Pieces(NamedTuple):
    """Of the tokens of each device and row: how many they are, whether a segment begins with one of them, and whether
    with the first. None where there is a single segment."""

    counts: Int[Array, "P B"]
    begins: Bool[Array, "P B"] | None = None
    begins_first: Bool[Array, "P B"] | None = None


def _pieces(segment_ids: Int[Array, "B T"], axis: str) -> _Pieces:
    is_token, resets = _math.tokens_and_resets(segment_ids)
    first, last = jnp.argmax(is_token, axis=1), is_token.shape[1] - 1 - jnp.argmax(is_token[:, ::-1], axis=1)
    ends = jnp.take_along_axis(segment_ids, jnp.stack([first, last], axis=1), axis=1)
    counts, inside, ends = (
        lax.all_gather(x, axis) for x in (jnp.sum(is_token, axis=1, dtype=jnp.int32), jnp.any(resets, axis=1), ends)
    )
    size, B, _ = ends.shape
    # Each device's first and last token, as a row of tokens.
    _, begins = _math.tokens_and_resets(ends.swapaxes(0, 1).reshape(B, 2 * size))
    begins_first = begins.reshape(B, size, 2)[:, :, 0].T
    return _Pieces(counts, inside | begins_first, begins_first)


# -- shared ------------------------------------------------------------------------------------------------------------


def _weigh(weight: Float[Array, "W D"], taps: list[Array]) -> Float[Array, "B T D"]:
    """The sum, in float32, of the tokens 0, 1, ... before each, times their weights."""
    weight = weight.astype(jnp.float32)[::-1]
    y = weight[0] * taps[0].astype(jnp.float32)
    for i, tap in enumerate(taps[1:], start=1):
        y += weight[i] * tap.astype(jnp.float32)
    return y


def _windows(x: Float[Array, "B W-1+T D"], past: int) -> list[Array]:
    """What `_weigh` takes, where `past` tokens come before the first."""
    T = x.shape[1] - past
    return [x[:, past - i : past - i + T] for i in range(past + 1)]


def _finish(y: Float[Array, "B T D"], bias: Array | None, silu: bool, x: Array) -> Float[Array, "B T D"]:
    if bias is not None:
        y = y + bias.astype(jnp.float32)
    return (jax.nn.silu(y) if silu else y).astype(x.dtype)


def _entering(states: Float[Array, "N W-1 D"], weight: Float[Array, "W D"]) -> Float[Array, "N W-1 D"]:
    """What states add to the first `W - 1` tokens of their sequences, in float32."""
    past = states.shape[1]
    return _weigh(weight, _windows(jnp.pad(states, ((0, 0), (0, past), (0, 0))), past))


def _take_rows(x: Float[Array, "B L D"], indices: Int[Array, "B M"]) -> Float[Array, "B M D"]:
    """Rows of width D; 0 for an index outside."""
    inside = (indices >= 0) & (indices < x.shape[1])
    taken = jnp.take_along_axis(x, jnp.where(inside, indices, 0)[..., None], axis=1, mode="promise_in_bounds")
    return _slots.keep(inside, taken)


def _take(x: Int[Array, "B T"], indices: Int[Array, "B M"], otherwise: int) -> Int[Array, "B M"]:
    """Numbers by their indices; `otherwise` for an index outside."""
    inside = (indices >= 0) & (indices < x.shape[1])
    taken = jnp.take_along_axis(x, jnp.where(inside, indices, 0), axis=1, mode="promise_in_bounds")
    return jnp.where(inside, taken, otherwise)


def _shift_indices(x: Int[Array, "B T"], by: int) -> Shaped[Array, "B T"]:
    """Of each token what its neighbour before (1) or after (-1) has; outside -1 and T."""
    T = x.shape[1]
    if by > 0:
        return jnp.pad(x, ((0, 0), (1, 0)), constant_values=-1)[:, :T]
    return jnp.pad(x, ((0, 0), (0, 1)), constant_values=T)[:, 1:]
