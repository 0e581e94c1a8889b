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
    """Computes a causal convolution of each channel over the tokens of a sequence."""
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
    """Computes the causal convolution for 1 to 16 tokens a row, on a state that is kept between calls."""
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
