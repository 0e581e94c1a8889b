"""Is the path, its kernels and its reason what the sizes, dtypes and built kernels call for?"""

import re

import jax
import jax.numpy as jnp
import pytest

import jaxqla
from jaxqla import _dispatch, _launch, ops
from jaxqla._checks import Dims

KERNELS = frozenset(
    f"gdn_{kernel}_{dtype}{tile}"
    for dtype in ("bf16", "fp16")
    for kernel, tiles in (
        ("chunk_inverse", ("",)),
        ("fused_forward", ("_v128", "_v64")),
        ("chunk_coupling", ("",)),
        ("backward_states", ("_v64",)),
        ("backward_gradients", ("",)),
    )
    for tile in tiles
)
BF16, FP16, F32 = jnp.dtype("bfloat16"), jnp.dtype("float16"), jnp.dtype("float32")


def dims(**changes):
    return Dims(**({"B": 2, "T": 70, "H": 3, "HV": 6, "K": 128, "V": 128, "N": 2} | changes))


def choose(*, dtype=BF16, implementation=None, kernels=KERNELS, capabilities=(), **sizes):
    return _dispatch.choose(
        dims(**sizes), dtype, implementation=implementation, kernels=kernels, capabilities=capabilities
    )


@pytest.mark.parametrize(
    ("dtype", "states", "plan"),
    [
        (BF16, 1, ("gdn_chunk_inverse_bf16", "gdn_fused_forward_bf16_v64")),
        (FP16, 11, ("gdn_chunk_inverse_fp16", "gdn_fused_forward_fp16_v64")),
        (BF16, 22, ("gdn_chunk_inverse_bf16", "gdn_fused_forward_bf16_v128")),
        (FP16, 1000, ("gdn_chunk_inverse_fp16", "gdn_fused_forward_fp16_v128")),
    ],
)
@pytest.mark.parametrize("implementation", [None, "cuda"])
def test_kernels(dtype, states, plan, implementation):
    choice = choose(dtype=dtype, N=states, implementation=implementation)
    assert choice.path == "cuda"
    assert choice.plan.forward_kernels == plan
    suffix = plan[0].rpartition("_")[2]
    assert all(suffix in kernel.split("_") for kernel in choice.plan.backward_kernels)
    assert str(choice.plan.v_tile) in choice.reason
    assert str(6 * states) in choice.reason


def test_v_tile_is_the_faster_one():
    # One wave of narrow tiles covers 66 states; two waves of them lose against one of wide ones.
    assert [_dispatch.v_tile(1, HV) for HV in (1, 66, 67, 132)] == [64, 64, 128, 128]
    assert _dispatch.v_tile(33, 2) == _dispatch.v_tile(2, 33) == 64


FALLBACKS = {
    "width": ({"K": 64}, "K = V = 128", "K = 64, V = 128"),
    "value width": ({"V": 256}, "K = V = 128", "K = 128, V = 256"),
    "dtype": ({"dtype": F32}, "q, k and v in bfloat16 or float16", "float32"),
    "device": ({"capabilities": ("8.0", "9.0")}, "compute capability 9.0", "8.0"),
    "partly built": (
        {
            "kernels": [
                name for name in KERNELS if name not in ("gdn_fused_forward_bf16_v64", "gdn_chunk_coupling_bf16")
            ]
        },
        "gdn_fused_forward_bf16_v64 and gdn_chunk_coupling_bf16 built",
        ", ".join(sorted(KERNELS - {"gdn_fused_forward_bf16_v64", "gdn_chunk_coupling_bf16"})),
    ),
}


@pytest.mark.parametrize(("changes", "need", "got"), FALLBACKS.values(), ids=FALLBACKS)
def test_what_kernels_cannot_run_falls_back_with_a_reason(changes, need, got):
    choice = choose(**changes)
    assert choice == _dispatch.Choice("xla", None, f"the kernels need {need}, got {got}")


@pytest.mark.parametrize(("changes", "need", "got"), FALLBACKS.values(), ids=FALLBACKS)
def test_asking_for_cuda_names_the_rule(changes, need, got):
    text = f"gated_delta: implementation='cuda' must have {need}, got {got}"
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        choose(implementation="cuda", **changes)


def test_kernels_that_are_not_built():
    assert choose(kernels=()).reason == "kernels are not built: run make kernels or install the wheel"
    with pytest.raises(ValueError, match=r"must have built kernels, got none: run make kernels or install the wheel$"):
        choose(kernels=(), implementation="cuda")


def test_every_broken_rule_is_named():
    text = "must have K = V = 128 and q, k and v in bfloat16 or float16, got K = 32, V = 128 and float32"
    with pytest.raises(ValueError, match=f"{text}$"):
        choose(K=32, dtype=F32, implementation="cuda")


def test_asking_for_xla():
    choice = choose(implementation="xla")
    assert (choice.path, choice.plan) == ("xla", None)
    assert choice.reason == "implementation='xla' was asked for"


# -- explain -----------------------------------------------------------------------------------------------------------


def abstract(K=128, dtype=jnp.bfloat16, **kwargs):
    shapes = ((2, 70, 3, K), (2, 70, 3, K), (2, 70, 6, 128), (2, 70, 6), (2, 70, 6))
    return jaxqla.explain(*(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes), **kwargs)


@pytest.fixture
def built(monkeypatch):
    monkeypatch.setattr(_launch, "available_kernels", lambda: KERNELS)
    monkeypatch.setattr(ops, "_cuda_capabilities", lambda: frozenset({"9.0"}))


@pytest.mark.usefixtures("built")
def test_explain_tells_path_kernels_and_why():
    told = abstract()
    assert told == ops.Explanation(
        path="cuda",
        kernels=("gdn_chunk_inverse_bf16", "gdn_fused_forward_bf16_v64"),
        backward_kernels=("gdn_chunk_coupling_bf16", "gdn_backward_states_bf16_v64", "gdn_backward_gradients_bf16"),
        reason="V tiles of 64 are fastest for N * HV = 12 states",
    )
    assert str(told) == (
        "gated_delta runs path 'cuda': kernels gdn_chunk_inverse_bf16, gdn_fused_forward_bf16_v64 (gradients: "
        "gdn_chunk_coupling_bf16, gdn_backward_states_bf16_v64, gdn_backward_gradients_bf16) on CUDA devices, "
        "plain JAX on other platforms. Why: V tiles of 64 are fastest for N * HV = 12 states."
    )


@pytest.mark.usefixtures("built")
def test_explain_tells_why_not():
    assert str(abstract(K=64)) == (
        "gated_delta runs path 'xla': plain JAX on every platform. "
        "Why: the kernels need K = V = 128, got K = 64, V = 128."
    )
    with pytest.raises(ValueError, match=r"^explain: implementation='cuda' must have K = V = 128, got K = 64, V = 128"):
        abstract(K=64, implementation="cuda")


def test_explain_without_kernels(monkeypatch):
    monkeypatch.setattr(_launch, "available_kernels", frozenset)
    assert "Why: kernels are not built: run make kernels or install the wheel." in str(abstract())


def test_explain_on_another_gpu(monkeypatch):
    monkeypatch.setattr(_launch, "available_kernels", lambda: KERNELS)
    monkeypatch.setattr(ops, "_cuda_capabilities", lambda: frozenset({"8.9"}))
    assert abstract().reason == "the kernels need compute capability 9.0, got 8.9"


def test_no_gpu_is_no_capability():
    # The suite runs on the CPU platform alone, as a machine that lowers ahead of time would.
    assert ops._cuda_capabilities() == frozenset()


@pytest.mark.usefixtures("built")
def test_packed_sequences_count_as_states():
    shapes = ((1, 70, 3, 128), (1, 70, 3, 128), (1, 70, 6, 128), (1, 70, 6), (1, 70, 6))
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float16) for shape in shapes]
    told = jaxqla.explain(*arrays, cu_seqlens=jax.ShapeDtypeStruct((101,), jnp.int32))
    assert told.kernels == ("gdn_chunk_inverse_fp16", "gdn_fused_forward_fp16_v128")
    assert told.reason.endswith("N * HV = 600 states")
