"""Every rule about the arguments of the public ops, and every message about them.

The rules read shapes, dtypes and Python values only, never data, so they hold for concrete, traced and abstract
arrays alike. Messages all have one form: *function: argument must rule = numbers, got numbers*.
"""

import math
import numbers
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

INPUT_DTYPES = ("bfloat16", "float16", "float32")
IMPLEMENTATIONS = (None, "cuda", "xla")
# Of a step: what its state may be stored in, and its most tokens.
STATE_DTYPES = ("float32", "bfloat16")
MAX_STEP_TOKENS = 16
# Of a convolution: fewest and most taps, and what may follow it.
NUM_TAPS = (2, 4)
ACTIVATIONS = (None, "silu", "swish")

# What to pass where others would let an argument be None.
_NEUTRAL = {"g": " (zeros for no decay)", "beta": " (ones for full steps)"}


@dataclass(frozen=True)
class Dims:
    """Sizes of one call: B rows of T tokens, H key heads, HV value heads, widths K and V, N sequences."""

    B: int
    T: int
    H: int
    HV: int
    K: int
    V: int
    N: int

    @classmethod
    def of(cls, q: Any, v: Any, cu_seqlens: Any) -> "Dims":
        """Reads the sizes off arrays that are already known to agree."""
        B, T, H, K = q.shape
        HV, V = v.shape[2:]
        N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
        return cls(B=B, T=T, H=H, HV=HV, K=K, V=V, N=N)


def message(function: str, argument: str, rule: str, got: object) -> str:
    """Builds every message of the public ops."""
    return f"{function}: {argument} must {rule}, got {got}"


def check_are_arrays(
    function: str, q: Any, k: Any, v: Any, g: Any, beta: Any, initial_state: Any, segment_ids: Any, cu_seqlens: Any
) -> None:
    """Checks that what must be an array is one, before anything is converted.

    Raises:
        TypeError: An argument has neither shape nor dtype.
    """
    check_arrays(
        function,
        {"q": q, "k": k, "v": v, "g": g, "beta": beta},
        {"initial_state": initial_state, "segment_ids": segment_ids, "cu_seqlens": cu_seqlens},
    )


def check_arrays(function: str, required: dict[str, Any], optional: dict[str, Any]) -> None:
    """Checks that what must be an array is one, by the names of the arguments; optional ones may be None.

    Raises:
        TypeError: An argument has neither shape nor dtype.
    """
    for name, x in required.items():
        if not _is_array(x):
            raise TypeError(message(function, name, f"be an array{_NEUTRAL.get(name, '')}", _kind(x)))
    for name, x in optional.items():
        if x is not None and not _is_array(x):
            raise TypeError(message(function, name, "be an array or None", _kind(x)))


def check(
    function: str,
    *,
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    scale: Any,
    initial_state: Any,
    return_final_state: Any,
    segment_ids: Any,
    cu_seqlens: Any,
    qk_l2norm: Any,
    implementation: Any,
) -> Dims:
    """Checks the shape, dtype or value of every argument of `gated_delta` and returns the sizes.

    Args:
        function: Name of the calling function; every message starts with it.

    The other arguments are those of `gated_delta`; arrays may be anything with a shape and a dtype.

    Raises:
        TypeError: An argument has the wrong type or dtype.
        ValueError: A shape or a value breaks a rule.
    """
    _check_inputs(function, q=q, k=k, v=v, g=g, beta=beta)
    _check_packing(function, q, segment_ids, cu_seqlens)
    dims = Dims.of(q, v, cu_seqlens)
    _check_state(function, dims, initial_state)
    _check_flag(function, "return_final_state", return_final_state)
    _check_flag(function, "qk_l2norm", qk_l2norm)
    _check_scale(function, scale)
    _check_implementation(function, implementation)
    return dims


def check_step(
    function: str,
    *,
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    state: Any,
    scale: Any,
    qk_l2norm: Any,
    state_indices: Any,
    valid_lengths: Any,
    return_states: Any,
    implementation: Any,
) -> None:
    """Checks the arguments of `gated_delta_step`; raises as `check` does."""
    _check_inputs(function, q=q, k=k, v=v, g=g, beta=beta)
    B, T, _, K = q.shape
    HV, V = v.shape[2:]
    _check_num_tokens(function, "q", T, "gated_delta")
    _check_slots(function, B, state, state_indices, valid_lengths, HV=HV, K=K, V=V)
    if state.dtype.name not in STATE_DTYPES:
        raise TypeError(message(function, "state", f"have dtype {_any_of(STATE_DTYPES)}", state.dtype))
    _check_flag(function, "qk_l2norm", qk_l2norm)
    _check_flag(function, "return_states", return_states)
    _check_scale(function, scale)
    _check_no_kernel(function, implementation)


def check_convolution(
    function: str,
    *,
    x: Any,
    weight: Any,
    bias: Any,
    activation: Any,
    initial_state: Any,
    return_final_state: Any,
    segment_ids: Any,
    cu_seqlens: Any,
    sequence_axis: Any,
    manual_axes: list[str],
    implementation: Any,
) -> None:
    """Checks the arguments of `causal_conv1d`, called where `manual_axes` are manual; raises as `check` does."""
    _check_taps(function, x, weight, bias, activation)
    _check_packing(function, x, segment_ids, cu_seqlens, name="x")
    N = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if initial_state is not None:
        shape = {"N": N, "W-1": weight.shape[0] - 1, "D": x.shape[2]}
        _check_shape_and_dtype(function, "initial_state", initial_state, shape, x)
    _check_flag(function, "return_final_state", return_final_state)
    check_sequence_axis(function, sequence_axis, manual_axes, cu_seqlens)
    _check_no_kernel(function, implementation)


def check_convolution_step(
    function: str,
    *,
    x: Any,
    weight: Any,
    bias: Any,
    state: Any,
    activation: Any,
    state_indices: Any,
    valid_lengths: Any,
    return_states: Any,
    implementation: Any,
) -> None:
    """Checks the arguments of `causal_conv1d_step`; raises as `check` does."""
    _check_taps(function, x, weight, bias, activation)
    B, T, D = x.shape
    _check_num_tokens(function, "x", T, "causal_conv1d")
    _check_slots(function, B, state, state_indices, valid_lengths, **{"W-1": weight.shape[0] - 1, "D": D})
    if state.dtype != x.dtype:
        raise TypeError(message(function, "state", f"have the dtype of x = {x.dtype}", state.dtype))
    _check_flag(function, "return_states", return_states)
    _check_no_kernel(function, implementation)


def check_gates(function: str, *, a: Any, b: Any, A_log: Any, dt_bias: Any, allow_neg_eigval: Any) -> None:
    """Checks the arguments of `gdn_gates`; raises as `check` does."""
    if a.ndim < 1:
        raise ValueError(message(function, "a", "have at least 1 dimension (..., HV)", f"shape {a.shape}"))
    if b.shape != a.shape:
        raise ValueError(message(function, "b", f"have the shape of a = {a.shape}", b.shape))
    for name, x in (("A_log", A_log), ("dt_bias", dt_bias)):
        if x.shape != a.shape[-1:]:
            raise ValueError(message(function, name, f"have shape {_shape(HV=a.shape[-1])}", x.shape))
    for name, x in (("a", a), ("b", b), ("A_log", A_log), ("dt_bias", dt_bias)):
        _check_floating(function, name, x)
    _check_flag(function, "allow_neg_eigval", allow_neg_eigval)


def check_sequence_axis(function: str, axis: Any, manual_axes: list[str], cu_seqlens: Any) -> None:
    """Checks the axis over which tokens are split, called where `manual_axes` are manual.

    Raises:
        ValueError: It is none of them, or comes with `cu_seqlens`.
    """
    if axis is None:
        return
    if axis not in manual_axes:
        rule = f"name a manual mesh axis of the shard_map it is called in (manual: {manual_axes})"
        raise ValueError(message(function, "sequence_axis", rule, repr(axis)))
    if cu_seqlens is not None:
        rule = "be None where sequence_axis is given; use segment_ids, which may cross devices"
        raise ValueError(message(function, "cu_seqlens", rule, "both"))


def _shape(**sizes: int) -> str:
    return f"({', '.join(sizes)}) = {tuple(sizes.values())}"


def _check_inputs(function: str, *, q: Any, k: Any, v: Any, g: Any, beta: Any) -> None:
    for name, x in (("q", q), ("v", v)):
        if x.ndim != 4:
            letters = "(B, T, H, K)" if name == "q" else "(B, T, HV, V)"
            raise ValueError(message(function, name, f"have 4 dimensions {letters}", f"shape {x.shape}"))
    B, T, H, K = q.shape
    if k.shape != q.shape:
        raise ValueError(message(function, "k", f"have the shape of q, {_shape(B=B, T=T, H=H, K=K)}", k.shape))
    if v.shape[:2] != (B, T):
        raise ValueError(message(function, "v", f"have the rows and tokens of q, {_shape(B=B, T=T)}", v.shape))
    HV, V = v.shape[2:]
    for name, size in (("q", H), ("q", K), ("v", HV), ("v", V)):
        if size == 0:
            x = q if name == "q" else v
            raise ValueError(
                message(function, name, "have at least one head of width at least one", f"shape {x.shape}")
            )
    if HV % H:
        rule = "have value heads that are a multiple of the heads of q and k"
        raise ValueError(message(function, "v", f"{rule}, HV % H = 0", f"HV = {HV}, H = {H}"))
    for name, x in (("g", g), ("beta", beta)):
        if x.shape != (B, T, HV):
            raise ValueError(message(function, name, f"have shape {_shape(B=B, T=T, HV=HV)}", x.shape))
        _check_floating(function, name, x)
    if q.dtype.name not in INPUT_DTYPES:
        raise TypeError(message(function, "q", f"have dtype {_any_of(INPUT_DTYPES)}", q.dtype))
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype:
            raise TypeError(message(function, name, f"have the dtype of q = {q.dtype}", x.dtype))


def _check_packing(function: str, x: Any, segment_ids: Any, cu_seqlens: Any, name: str = "q") -> None:
    B, T = x.shape[:2]
    if segment_ids is not None and cu_seqlens is not None:
        rule = "be None where segment_ids is given"
        raise ValueError(message(function, "cu_seqlens", rule, "both"))
    if segment_ids is not None:
        if segment_ids.shape != (B, T):
            raise ValueError(message(function, "segment_ids", f"have shape {_shape(B=B, T=T)}", segment_ids.shape))
        if segment_ids.dtype != np.int32:
            raise TypeError(message(function, "segment_ids", "have dtype int32", segment_ids.dtype))
    if cu_seqlens is not None:
        if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 1:
            raise ValueError(
                message(function, "cu_seqlens", "have shape (N + 1,) with N >= 0 sequences", cu_seqlens.shape)
            )
        if cu_seqlens.dtype != np.int32:
            raise TypeError(message(function, "cu_seqlens", "have dtype int32", cu_seqlens.dtype))
        if B != 1:
            raise ValueError(message(function, name, "have B = 1 row where cu_seqlens is given", f"B = {B}"))


def _check_state(function: str, dims: Dims, initial_state: Any) -> None:
    if initial_state is None:
        return
    if initial_state.shape != (dims.N, dims.HV, dims.K, dims.V):
        rule = f"have shape {_shape(N=dims.N, HV=dims.HV, K=dims.K, V=dims.V)}"
        raise ValueError(message(function, "initial_state", rule, initial_state.shape))
    if initial_state.dtype != np.float32:
        raise TypeError(message(function, "initial_state", "have dtype float32", initial_state.dtype))


def _check_taps(function: str, x: Any, weight: Any, bias: Any, activation: Any) -> None:
    """What the two convolutions have in common."""
    if x.ndim != 3:
        raise ValueError(message(function, "x", "have 3 dimensions (B, T, D)", f"shape {x.shape}"))
    if x.dtype.name not in INPUT_DTYPES:
        raise TypeError(message(function, "x", f"have dtype {_any_of(INPUT_DTYPES)}", x.dtype))
    D = x.shape[2]
    if weight.ndim != 2 or weight.shape[1] != D:
        raise ValueError(message(function, "weight", f"have shape (W, D) with D = {D}", weight.shape))
    least, most = NUM_TAPS
    if not least <= weight.shape[0] <= most:
        raise ValueError(message(function, "weight", f"have W = {least} to {most} taps", f"W = {weight.shape[0]}"))
    _check_floating(function, "weight", weight)
    if bias is not None:
        if bias.shape != (D,):
            raise ValueError(message(function, "bias", f"have shape {_shape(D=D)}", bias.shape))
        _check_floating(function, "bias", bias)
    if activation not in ACTIVATIONS:
        names = _any_of(tuple(repr(x) for x in ACTIVATIONS))
        raise ValueError(message(function, "activation", f"be {names}", repr(activation)))


def _check_num_tokens(function: str, name: str, T: int, other: str) -> None:
    if not 1 <= T <= MAX_STEP_TOKENS:
        rule = f"have T = 1 to {MAX_STEP_TOKENS} tokens ({other} takes any number)"
        raise ValueError(message(function, name, rule, f"T = {T}"))


def _check_slots(function: str, B: int, state: Any, state_indices: Any, valid_lengths: Any, **widths: int) -> None:
    """The states of rows, or of a pool that `state_indices` point into."""
    for name, x in (("state_indices", state_indices), ("valid_lengths", valid_lengths)):
        if x is not None:
            if x.shape != (B,):
                raise ValueError(message(function, name, f"have shape {_shape(B=B)}", x.shape))
            if x.dtype != np.int32:
                raise TypeError(message(function, name, "have dtype int32", x.dtype))
    if state_indices is None:
        if state.shape != (B, *widths.values()):
            raise ValueError(message(function, "state", f"have shape {_shape(B=B, **widths)}", state.shape))
    elif state.shape[1:] != tuple(widths.values()) or not state.shape[0]:
        letters, sizes = ", ".join(widths), ", ".join(map(str, widths.values()))
        rule = f"have shape (P, {letters}) = (P, {sizes}) with P >= 1 slots where state_indices is given"
        raise ValueError(message(function, "state", rule, state.shape))


def _check_shape_and_dtype(function: str, name: str, array: Any, shape: dict[str, int], x: Any) -> None:
    if array.shape != tuple(shape.values()):
        raise ValueError(message(function, name, f"have shape {_shape(**shape)}", array.shape))
    if array.dtype != x.dtype:
        raise TypeError(message(function, name, f"have the dtype of x = {x.dtype}", array.dtype))


def _check_floating(function: str, name: str, x: Any) -> None:
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(message(function, name, "have a floating dtype", x.dtype))


def _check_flag(function: str, name: str, value: Any) -> None:
    if not isinstance(value, bool | np.bool_):
        raise TypeError(message(function, name, "be True or False, a Python value", _kind(value)))


def _check_scale(function: str, scale: Any) -> None:
    if scale is None:
        return
    # A traced scale would need a new kernel argument; a concrete jax array would need a transfer to the host.
    if isinstance(scale, bool) or not isinstance(scale, numbers.Real | np.floating | np.integer):
        raise TypeError(
            message(function, "scale", "be a Python number or None (multiply q by a traced one)", _kind(scale))
        )
    if not math.isfinite(scale):
        raise ValueError(message(function, "scale", "be finite", scale))


def _check_implementation(function: str, implementation: Any) -> None:
    if implementation not in IMPLEMENTATIONS:
        names = _any_of(tuple(repr(x) for x in IMPLEMENTATIONS))
        raise ValueError(message(function, "implementation", f"be {names}", repr(implementation)))


def _check_no_kernel(function: str, implementation: Any) -> None:
    _check_implementation(function, implementation)
    if implementation == "cuda":
        raise ValueError(message(function, "implementation", "be None or 'xla', as it has no kernels", "'cuda'"))


def _any_of(names: tuple[str, ...]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"


def _is_array(x: Any) -> bool:
    return hasattr(x, "shape") and hasattr(x, "dtype")


def _kind(x: Any) -> str:
    return "None" if x is None else type(x).__name__
