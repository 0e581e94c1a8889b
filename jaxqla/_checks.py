"""Every rule about the arguments of the public op, and every message about them.

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
    """Builds every message of the public op."""
    return f"{function}: {argument} must {rule}, got {got}"


def check_are_arrays(
    function: str, q: Any, k: Any, v: Any, g: Any, beta: Any, initial_state: Any, segment_ids: Any, cu_seqlens: Any
) -> None:
    """Checks that what must be an array is one, before anything is converted.

    Raises:
        TypeError: An argument has neither shape nor dtype.
    """
    for name, x in (("q", q), ("k", k), ("v", v), ("g", g), ("beta", beta)):
        if not _is_array(x):
            raise TypeError(message(function, name, f"be an array{_NEUTRAL.get(name, '')}", _kind(x)))
    for name, x in (("initial_state", initial_state), ("segment_ids", segment_ids), ("cu_seqlens", cu_seqlens)):
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
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(message(function, name, "have a floating dtype", x.dtype))
    if q.dtype.name not in INPUT_DTYPES:
        raise TypeError(message(function, "q", f"have dtype {_any_of(INPUT_DTYPES)}", q.dtype))
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype:
            raise TypeError(message(function, name, f"have the dtype of q = {q.dtype}", x.dtype))


def _check_packing(function: str, q: Any, segment_ids: Any, cu_seqlens: Any) -> None:
    B, T = q.shape[:2]
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
            raise ValueError(message(function, "q", "have B = 1 row where cu_seqlens is given", f"B = {B}"))


def _check_state(function: str, dims: Dims, initial_state: Any) -> None:
    if initial_state is None:
        return
    if initial_state.shape != (dims.N, dims.HV, dims.K, dims.V):
        rule = f"have shape {_shape(N=dims.N, HV=dims.HV, K=dims.K, V=dims.V)}"
        raise ValueError(message(function, "initial_state", rule, initial_state.shape))
    if initial_state.dtype != np.float32:
        raise TypeError(message(function, "initial_state", "have dtype float32", initial_state.dtype))


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


def _any_of(names: tuple[str, ...]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"


def _is_array(x: Any) -> bool:
    return hasattr(x, "shape") and hasattr(x, "dtype")


def _kind(x: Any) -> str:
    return "None" if x is None else type(x).__name__
