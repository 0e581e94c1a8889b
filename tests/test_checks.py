"""Does every wrong argument get a message that names it, the rule and the numbers?"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxqla

B, T, H, HV, K, V = 2, 7, 3, 6, 5, 4

SHAPES = {
    "q": (B, T, H, K),
    "k": (B, T, H, K),
    "v": (B, T, HV, V),
    "g": (B, T, HV),
    "beta": (B, T, HV),
    "initial_state": (B, HV, K, V),
}


REQUIRED = ("q", "k", "v", "g", "beta")


def array(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


ONE_ROW = {name: array(1, *SHAPES[name][1:]) for name in REQUIRED}


def call(function=jaxqla.explain, **changes):
    """Calls with arguments that are right but for what is changed."""
    arguments = {name: array(*SHAPES[name]) for name in REQUIRED} | changes
    if function is jaxqla.explain:
        return function(**arguments)
    return function(
        **{k: jnp.zeros(x.shape, x.dtype) if isinstance(x, jax.ShapeDtypeStruct) else x for k, x in arguments.items()}
    )


# What is changed, the error, and the message after the function's name.
WRONG_VALUES = {
    "q rank": (
        {"q": array(B, T, K)},
        "q must have 4 dimensions (B, T, H, K), got shape (2, 7, 5)",
    ),
    "v rank": (
        {"v": array(B, T, HV)},
        "v must have 4 dimensions (B, T, HV, V), got shape (2, 7, 6)",
    ),
    "k shape": (
        {"k": array(B, T, H, K + 1)},
        "k must have the shape of q, (B, T, H, K) = (2, 7, 3, 5), got (2, 7, 3, 6)",
    ),
    "v rows": (
        {"v": array(B + 1, T, HV, V)},
        "v must have the rows and tokens of q, (B, T) = (2, 7), got (3, 7, 6, 4)",
    ),
    "no heads": (
        {"v": array(B, T, 0, V)},
        "v must have at least one head of width at least one, got shape (2, 7, 0, 4)",
    ),
    "no width": (
        {"q": array(B, T, H, 0), "k": array(B, T, H, 0)},
        "q must have at least one head of width at least one, got shape (2, 7, 3, 0)",
    ),
    "head groups": (
        {"v": array(B, T, HV + 1, V)},
        "v must have value heads that are a multiple of the heads of q and k, HV % H = 0, got HV = 7, H = 3",
    ),
    "g shape": (
        {"g": array(B, T, H)},
        "g must have shape (B, T, HV) = (2, 7, 6), got (2, 7, 3)",
    ),
    "beta shape": (
        {"beta": array(B, HV, T)},
        "beta must have shape (B, T, HV) = (2, 7, 6), got (2, 6, 7)",
    ),
    "initial_state shape": (
        {"initial_state": array(B, HV, V, K)},
        "initial_state must have shape (N, HV, K, V) = (2, 6, 5, 4), got (2, 6, 4, 5)",
    ),
    "initial_state sequences": (
        ONE_ROW | {"initial_state": array(1, HV, K, V), "cu_seqlens": array(4, dtype=jnp.int32)},
        "initial_state must have shape (N, HV, K, V) = (3, 6, 5, 4), got (1, 6, 5, 4)",
    ),
    "segment_ids shape": (
        {"segment_ids": array(T, dtype=jnp.int32)},
        "segment_ids must have shape (B, T) = (2, 7), got (7,)",
    ),
    "cu_seqlens shape": (
        ONE_ROW | {"cu_seqlens": array(1, 4, dtype=jnp.int32)},
        "cu_seqlens must have shape (N + 1,) with N >= 0 sequences, got (1, 4)",
    ),
    "cu_seqlens empty": (
        ONE_ROW | {"cu_seqlens": array(0, dtype=jnp.int32)},
        "cu_seqlens must have shape (N + 1,) with N >= 0 sequences, got (0,)",
    ),
    "cu_seqlens rows": (
        {"cu_seqlens": array(3, dtype=jnp.int32)},
        "q must have B = 1 row where cu_seqlens is given, got B = 2",
    ),
    "two packings": (
        {"cu_seqlens": array(3, dtype=jnp.int32), "segment_ids": array(B, T, dtype=jnp.int32)},
        "cu_seqlens must be None where segment_ids is given, got both",
    ),
    "scale": (
        {"scale": float("nan")},
        "scale must be finite, got nan",
    ),
    "implementation": (
        {"implementation": "triton"},
        "implementation must be None, 'cuda' or 'xla', got 'triton'",
    ),
}

WRONG_TYPES = {
    "no g": (
        {"g": None},
        "g must be an array (zeros for no decay), got None",
    ),
    "no beta": (
        {"beta": None},
        "beta must be an array (ones for full steps), got None",
    ),
    "list": (
        {"q": [[[[1.0]]]]},
        "q must be an array, got list",
    ),
    "number for an optional array": (
        {"initial_state": 0.0},
        "initial_state must be an array or None, got float",
    ),
    "q dtype": (
        {name: array(*SHAPES[name], dtype=jnp.int32) for name in ("q", "k", "v")},
        "q must have dtype bfloat16, float16 or float32, got int32",
    ),
    "k dtype": (
        {"k": array(B, T, H, K, dtype=jnp.bfloat16)},
        "k must have the dtype of q = float32, got bfloat16",
    ),
    "v dtype": (
        {"v": array(B, T, HV, V, dtype=jnp.float16)},
        "v must have the dtype of q = float32, got float16",
    ),
    "integer g": (
        {"g": array(B, T, HV, dtype=jnp.int32)},
        "g must have a floating dtype, got int32",
    ),
    "complex beta": (
        {"beta": array(B, T, HV, dtype=jnp.complex64)},
        "beta must have a floating dtype, got complex64",
    ),
    "initial_state dtype": (
        {"initial_state": array(B, HV, K, V, dtype=jnp.bfloat16)},
        "initial_state must have dtype float32, got bfloat16",
    ),
    "segment_ids dtype": (
        {"segment_ids": array(B, T)},
        "segment_ids must have dtype int32, got float32",
    ),
    "cu_seqlens dtype": (
        ONE_ROW | {"cu_seqlens": array(3, dtype=jnp.uint32)},
        "cu_seqlens must have dtype int32, got uint32",
    ),
    "flag": (
        {"return_final_state": 1},
        "return_final_state must be True or False, a Python value, got int",
    ),
    "other flag": (
        {"qk_l2norm": None},
        "qk_l2norm must be True or False, a Python value, got None",
    ),
    "scale type": (
        {"scale": "1"},
        "scale must be a Python number or None (multiply q by a traced one), got str",
    ),
    "scale flag": (
        {"scale": True},
        "scale must be a Python number or None (multiply q by a traced one), got bool",
    ),
}


@pytest.mark.parametrize(("changes", "text"), WRONG_VALUES.values(), ids=WRONG_VALUES)
def test_wrong_value(changes, text):
    with pytest.raises(ValueError, match=f"^explain: {re.escape(text)}$"):
        call(**changes)


@pytest.mark.parametrize(("changes", "text"), WRONG_TYPES.values(), ids=WRONG_TYPES)
def test_wrong_type(changes, text):
    with pytest.raises(TypeError, match=f"^explain: {re.escape(text)}$"):
        call(**changes)


def test_the_op_checks_too_and_names_itself():
    with pytest.raises(ValueError, match=r"^gated_delta: g must have shape \(B, T, HV\) = \(2, 7, 6\), got \(2, 7\)$"):
        call(jaxqla.gated_delta, g=jnp.zeros((B, T)))
    with pytest.raises(TypeError, match=r"^gated_delta: beta must be an array \(ones for full steps\), got None$"):
        call(jaxqla.gated_delta, beta=None)


def test_traced_options_are_refused():
    with pytest.raises(TypeError, match=r"^gated_delta: scale must be a Python number or None .*, got .*Tracer\b"):
        jax.jit(lambda scale: call(jaxqla.gated_delta, scale=scale))(1.0)
    with pytest.raises(TypeError, match=r"^gated_delta: qk_l2norm must be True or False, .*, got .*Tracer\b"):
        jax.jit(lambda flag: call(jaxqla.gated_delta, qk_l2norm=flag))(True)


def test_float64_is_refused_where_it_exists():
    # Without x64, jax turns NumPy's float64 into float32 before the op sees it.
    wide = {name: np.zeros(SHAPES[name]) for name in REQUIRED}
    assert call(**wide).path == "xla"
    with jax.enable_x64(True):
        with pytest.raises(TypeError, match=r"^explain: q must have dtype .* or float32, got float64$"):
            call(**wide)
        with pytest.raises(TypeError, match=r"^gated_delta: q must have dtype .* or float32, got float64$"):
            call(jaxqla.gated_delta, **wide)
        with pytest.raises(TypeError, match=r"^explain: initial_state must have dtype float32, got float64$"):
            call(**ONE_ROW, initial_state=np.zeros((1, HV, K, V)))
        with pytest.raises(TypeError, match=r"^explain: segment_ids must have dtype int32, got int64$"):
            call(**ONE_ROW, segment_ids=np.ones((1, T), np.int64))


def test_numbers_of_every_kind_are_a_scale():
    for scale in (0, 1.5, np.float32(0.5), np.int64(2), None):
        call(scale=scale)
    call(return_final_state=np.True_, qk_l2norm=np.False_)
