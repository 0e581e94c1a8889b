"""The kernels that are built, and for which options."""

from dataclasses import dataclass, field
from typing import Any

DTYPES = {"bf16": "bfloat16", "fp16": "float16"}
V_TILES = (128, 64)

# The kernels place their own barriers and lay out their own shared memory; ptxas may use every register of a warpgroup.
PASS_CONFIGS = {
    "tl.disable_safe_memory_legalize": True,
    "tl.disable_thread_storage_sync": True,
    "tl.disable_shared_memory_reuse": True,
    "tl.enable_fast_math": True,
    "tl.ptxas_register_usage_level": 10,
}


@dataclass(frozen=True)
class Kernel:
    """One kernel: who makes it, with which options, and what a call of it passes.

    Attributes:
        name: Name in the launch table.
        builder: `module:function`; called with the options, and with dtype, K and V where it takes them.
        options: What else the builder takes.
        operands: Buffer parameters of the kernel that are inputs of a call, in the order of the call.
        results: Buffer parameters that are results of a call, in order.
        in_place: Buffers that are both.
        dtype: Dtype of q, k and v.
        K: Width of queries and keys.
        V: Width of values.
        pass_configs: TileLang's pass options.
    """

    name: str
    builder: str
    operands: tuple[str, ...]
    results: tuple[str, ...]
    dtype: str
    options: dict[str, Any] = field(default_factory=dict)
    in_place: tuple[str, ...] = ()
    K: int = 128
    V: int = 128
    pass_configs: dict[str, Any] = field(default_factory=lambda: dict(PASS_CONFIGS))


def _chunk_inverse(suffix: str, inverse: bool) -> Kernel:
    return Kernel(
        name=f"gdn_chunk_{'inverse' if inverse else 'coupling'}_{suffix}",
        builder="kernels.chunk_inverse:chunk_inverse",
        options={"inverse": inverse},
        operands=("k", "g", "beta", "cu_seqlens", "row_flags"),
        results=("out", "g_cum"),
        dtype=DTYPES[suffix],
    )


def _fused_forward(suffix: str, v_tile: int) -> Kernel:
    return Kernel(
        name=f"gdn_fused_forward_{suffix}_v{v_tile}",
        builder="kernels.fused_forward:fused_forward",
        options={"v_tile": v_tile},
        operands=("q", "k", "v", "a", "g_cum", "cu_seqlens", "row_flags", "initial_state"),
        results=("o", "final_state"),
        dtype=DTYPES[suffix],
    )


def _backward_states(suffix: str, v_tile: int) -> Kernel:
    return Kernel(
        name=f"gdn_backward_states_{suffix}_v{v_tile}",
        builder="kernels.backward_states:backward_states",
        options={"v_tile": v_tile},
        operands=(
            "q",
            "k",
            "v",
            "do",
            "y",
            "g_cum",
            "beta",
            "cu_seqlens",
            "row_flags",
            "initial_state",
            "dfinal_state",
        ),
        results=("states", "errors", "dstates", "derrors", "dv", "dinitial_state"),
        dtype=DTYPES[suffix],
    )


def _backward_gradients(suffix: str) -> Kernel:
    return Kernel(
        name=f"gdn_backward_gradients_{suffix}",
        builder="kernels.backward_gradients:backward_gradients",
        operands=(
            "q",
            "k",
            "do",
            "states",
            "errors",
            "dstates",
            "derrors",
            "g_cum",
            "beta",
            "cu_seqlens",
            "row_flags",
        ),
        results=("dq", "dk", "dg", "dbeta"),
        dtype=DTYPES[suffix],
    )


KERNELS = (
    *(_chunk_inverse(suffix, inverse) for suffix in DTYPES for inverse in (True, False)),
    *(_fused_forward(suffix, v_tile) for suffix in DTYPES for v_tile in V_TILES),
    *(_backward_states(suffix, 64) for suffix in DTYPES),
    *(_backward_gradients(suffix) for suffix in DTYPES),
)
