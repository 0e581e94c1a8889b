"""Which path a call takes, with which kernels, and why. Pure: reads sizes and names, touches no device.

The choice rests on static facts only. Data never enters it, so a call of known shapes always runs the same kernels.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal

from jaxqla._checks import Dims, message

Path = Literal["cuda", "xla"]

# What the built kernels were compiled for; a test compares these with the kernel table.
KERNEL_WIDTH = 128
KERNEL_CAPABILITY = "9.0"
KERNEL_DTYPES = {"bfloat16": "bf16", "float16": "fp16"}

_NOT_BUILT = ("built kernels", "none: run make kernels or install the wheel")

# Time of one chunk of one head in the fused kernel on an H200, in microseconds, by V tile, and the number of SMs.
_CHUNK_US = {128: 2.2, 64: 1.5}
_NUM_SMS = 132


@dataclass(frozen=True)
class Plan:
    """The kernels of a call and of its gradient, and the width of a V tile of the fused one of the forward."""

    inverse: str
    fused: str
    coupling: str
    states: str
    gradients: str
    v_tile: int

    @property
    def forward_kernels(self) -> tuple[str, ...]:
        return (self.inverse, self.fused)

    @property
    def backward_kernels(self) -> tuple[str, ...]:
        return (self.coupling, self.states, self.gradients)


@dataclass(frozen=True)
class Choice:
    """The path of a call.

    "cuda" means: kernels where the program is lowered for CUDA, plain JAX on every other platform. "xla" means plain
    JAX everywhere.
    """

    path: Path
    plan: Plan | None
    reason: str


def v_tile(N: int, HV: int) -> int:
    """Width of a V tile of the fused kernel, by the estimated time of N sequences of HV heads.

    A narrower tile makes two blocks of every head: each is faster, but together they take more of the machine.
    """
    items = N * HV
    narrow = math.ceil(2 * items / _NUM_SMS) * _CHUNK_US[64]
    wide = math.ceil(items / _NUM_SMS) * _CHUNK_US[128]
    return 64 if narrow < wide else 128


def make_plan(dims: Dims, dtype: Any) -> Plan:
    """Names the kernels for these sizes; whether they exist is for `choose` to say."""
    suffix = KERNEL_DTYPES[dtype.name]
    tile = v_tile(dims.N, dims.HV)
    return Plan(
        inverse=f"gdn_chunk_inverse_{suffix}",
        fused=f"gdn_fused_forward_{suffix}_v{tile}",
        coupling=f"gdn_chunk_coupling_{suffix}",
        states=f"gdn_backward_states_{suffix}_v64",
        gradients=f"gdn_backward_gradients_{suffix}",
        v_tile=tile,
    )


def choose(
    dims: Dims,
    dtype: Any,
    *,
    implementation: str | None,
    kernels: Collection[str],
    capabilities: Collection[str] = (),
    function: str = "gated_delta",
) -> Choice:
    """Chooses the path of a call.

    Args:
        dims: Sizes of the call.
        dtype: Dtype of q, k and v.
        implementation: `None`, `"cuda"` or `"xla"`, as given by the user.
        kernels: Names of the kernels that are built.
        capabilities: Compute capabilities of the CUDA devices of this process, as far as they are known. Empty where
            there is none, as when lowering ahead of time on a machine without a GPU.
        function: Name of the calling function, for the message.

    Raises:
        ValueError: `implementation="cuda"`, and the kernels cannot run this call. The message names every rule that
            failed.
    """
    if implementation == "xla":
        return Choice("xla", None, "implementation='xla' was asked for")
    failures = _failures(dims, dtype, kernels, capabilities)
    if not failures:
        plan = make_plan(dims, dtype)
        return Choice("cuda", plan, f"V tiles of {plan.v_tile} are fastest for N * HV = {dims.N * dims.HV} states")
    if implementation == "cuda":
        needs, gots = (" and ".join(x) for x in zip(*failures, strict=True))
        raise ValueError(message(function, "implementation='cuda'", f"have {needs}", gots))
    return Choice("xla", None, "; ".join(_reason(*failure) for failure in failures))


def _failures(dims: Dims, dtype: Any, kernels: Collection[str], capabilities: Collection[str]) -> list[tuple[str, str]]:
    """Every rule of the kernels that the call breaks, as what they need and what they got."""
    failures = []
    if (dims.K, dims.V) != (KERNEL_WIDTH, KERNEL_WIDTH):
        failures.append((f"K = V = {KERNEL_WIDTH}", f"K = {dims.K}, V = {dims.V}"))
    if dtype.name not in KERNEL_DTYPES:
        failures.append((f"q, k and v in {' or '.join(KERNEL_DTYPES)}", dtype.name))
    others = sorted(set(capabilities) - {KERNEL_CAPABILITY})
    if others:
        failures.append((f"compute capability {KERNEL_CAPABILITY}", ", ".join(others)))
    if not kernels:
        failures.append(_NOT_BUILT)
    elif not failures:
        plan = make_plan(dims, dtype)
        missing = [name for name in plan.forward_kernels + plan.backward_kernels if name not in kernels]
        if missing:
            failures.append((f"{' and '.join(missing)} built", ", ".join(sorted(kernels))))
    return failures


def _reason(need: str, got: str) -> str:
    if (need, got) == _NOT_BUILT:
        return "kernels are not built: run make kernels or install the wheel"
    return f"the kernels need {need}, got {got}"
