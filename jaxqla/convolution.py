"""The public operators of the causal convolution."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxqla import _checks, _convolution, _sharding


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
    sequence_axis: str | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "B T D"], Float[Array, "N W-1 D"] | None]:
    """Computes a causal convolution of each channel over the tokens of a sequence.

    With the `W - 1` tokens of the state before the first token of each sequence:

        y_t = activation(bias + sum over i = 0 .. W-1 of weight[W - 1 - i] x_{t-i})

    so that the last row of `weight` meets the token itself. Letters: `B` rows of `T` tokens, `D` channels, `W` taps,
    `N` sequences: `N = B`, or one less than the length of `cu_seqlens`.

    Numerics: products, their sum, bias and activation are float32 whatever the dtypes; the output is rounded once, to
    the dtype of `x`. A state holds tokens as they are, so a sequence in pieces gives what one call gives, but for the
    order of sums in the last digit of float32.

    Transformations: `jit`, `vmap` over any subset of the arguments, `grad` (also of a `grad`), `scan`, `jax.export`.
    The inputs are the only residuals of the forward. Rows and channels may be split over a mesh with no collective but
    the sums of the gradients of `weight` and `bias`.

    Args:
        x: Tokens, bfloat16, float16 or float32. Any `T`, 0 and less than `W` included.
        weight: Taps, any floating dtype, `2 <= W <= 4`.
        bias: What is added to each channel, any floating dtype. The default is none.
        activation: `"silu"`, or `"swish"`, which is the same; None, the default, for none.
        initial_state: The `W - 1` tokens before the first of each sequence, the oldest first, of the dtype of `x`. The
            default is zeros. With `segment_ids` the first segment of a row takes it.
        return_final_state: Whether to return the last `W - 1` tokens of each sequence, those of the initial state
            included where the sequence is shorter.
        segment_ids: Int32; several sequences in one row. A token whose id differs from that of the last token before
            it that is no padding has nothing but zeros before it. Id 0 is padding: no token sees it, its output and
            gradients are exactly 0, and it may hold anything, NaN included.
        cu_seqlens: Int32, non-decreasing, from 0 to at most `T`; sequence `n` is the rows `cu_seqlens[n]` to
            `cu_seqlens[n + 1]` of the only batch row (`B = 1`), with a state of its own. Empty sequences hand their
            state through. Tokens past the last boundary are padding as above. Only the length is checked, never the
            values. Not together with `segment_ids`.
        sequence_axis: Inside `jax.shard_map`, the mesh axis over which tokens are split, in the order of the axis. The
            devices exchange `W - 1` tokens a row. `initial_state` and the final state are those of the whole rows, the
            same on all devices. Not together with `cu_seqlens`.
        implementation: None or `"xla"`: plain JAX. `"cuda"` raises: there is no kernel of the convolution.

    Returns:
        `y` of the shape and dtype of `x`, and the final state `[N, W-1, D]` in that dtype, or None where it was not
        asked for.

    Raises:
        TypeError: An argument has the wrong type or dtype.
        ValueError: A shape or a value breaks a rule above; the message gives the numbers.
    """
    _checks.check_arrays(
        "causal_conv1d",
        {"x": x, "weight": weight},
        {"bias": bias, "initial_state": initial_state, "segment_ids": segment_ids, "cu_seqlens": cu_seqlens},
    )
    arrays = (x, weight, bias, initial_state, segment_ids, cu_seqlens)
    x, weight, bias, initial_state, segment_ids, cu_seqlens = jax.tree.map(jnp.asarray, arrays)
    _checks.check_convolution(
        "causal_conv1d",
        x=x,
        weight=weight,
        bias=bias,
        activation=activation,
        initial_state=initial_state,
        return_final_state=return_final_state,
        segment_ids=segment_ids,
        cu_seqlens=cu_seqlens,
        sequence_axis=sequence_axis,
        manual_axes=_sharding.manual_axes() if sequence_axis is not None else [],
        implementation=implementation,
    )
    silu = activation is not None
    if sequence_axis is not None:
        y, state = _convolution.over_devices(sequence_axis, x, weight, bias, initial_state, segment_ids, silu=silu)
    else:
        y, state = _convolution.forward(x, weight, bias, initial_state, segment_ids, cu_seqlens, silu=silu)
    return y, state if return_final_state else None


def causal_conv1d_step(
    x: Float[Array, "B T D"],
    weight: Float[Array, "W D"],
    bias: Float[Array, " D"] | None = None,
    *,
    state: Float[Array, "B W-1 D"] | Float[Array, "P W-1 D"],
    activation: str | None = None,
    state_indices: Int[Array, " B"] | None = None,
    valid_lengths: Int[Array, " B"] | None = None,
    return_states: bool = False,
    implementation: str | None = None,
) -> tuple[Array, ...]:
    """Computes the causal convolution for 1 to 16 tokens a row, on a state that is kept between calls.

    The convolution is that of `causal_conv1d`; here the state goes in and comes out. Donate it to `jax.jit` to change
    it in place.

    Numerics: those of `causal_conv1d`; after any number of steps the state is that of one call, bit for bit.

    Args:
        x: Tokens, bfloat16, float16 or float32, `1 <= T <= 16`.
        weight: Taps, any floating dtype, `2 <= W <= 4`; the last row meets the token itself.
        bias: What is added to each channel, any floating dtype. The default is none.
        state: The `W - 1` tokens before these in each row, the oldest first, of the dtype of `x`; zeros before the
            first token. Or with `state_indices` a pool of `P` states, `P >= 1`.
        activation: `"silu"`, or `"swish"`, which is the same; None, the default, for none.
        state_indices: Int32; the place of each row's state in the pool. No two active rows may share one. A row whose
            index is negative or past the pool is inactive: it writes nothing and its output is 0. The default is that
            row `b` has state `b`.
        valid_lengths: Int32 from 0 to `T`; tokens of a row at or past it change nothing, may hold anything, and their
            outputs are 0. The default is `T`.
        return_states: Whether to return the state after each token too, as speculative decoding needs it.
        implementation: None or `"xla"`: plain JAX. `"cuda"` raises: there is no kernel of the step.

    Returns:
        `y` of the shape and dtype of `x`; the new `state`, of the shape and dtype of the old; and where `return_states`
        is true the states after each token, `[B, T, W-1, D]` in that dtype.

    Raises:
        TypeError: An argument has the wrong type or dtype.
        ValueError: A shape or a value breaks a rule above; the message gives the numbers.
    """
    _checks.check_arrays(
        "causal_conv1d_step",
        {"x": x, "weight": weight, "state": state},
        {"bias": bias, "state_indices": state_indices, "valid_lengths": valid_lengths},
    )
    arrays = (x, weight, bias, state, state_indices, valid_lengths)
    x, weight, bias, state, state_indices, valid_lengths = jax.tree.map(jnp.asarray, arrays)
    _checks.check_convolution_step(
        "causal_conv1d_step",
        x=x,
        weight=weight,
        bias=bias,
        state=state,
        activation=activation,
        state_indices=state_indices,
        valid_lengths=valid_lengths,
        return_states=return_states,
        implementation=implementation,
    )
    y, state, states = _convolution.step(
        x, weight, bias, state, state_indices, valid_lengths, silu=activation is not None
    )
    return (y, state, states) if return_states else (y, state)
