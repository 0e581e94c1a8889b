"""Everything that can be measured: ours on its two paths, and the peers, each imported only when it is asked for."""

import importlib
import importlib.metadata
import importlib.util
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.inputs import Inputs, num_sets
from benchmarks.rows import Row

FORWARD_ONLY = ("forward",)
DIRECTIONS = ("forward", "backward", "forward_backward")


def _as_given(row: Row, inputs: Inputs) -> Inputs:
    return inputs


def _as_returned(row: Row, results: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
    return results


def _several(row: Row) -> int:
    """Calls in one program or graph: over all sets, and enough that the gap between two programs is lost among them."""
    return max(4, num_sets(row))


@dataclass(frozen=True)
class Implementation:
    """One way to compute the operator.

    Attributes:
        name: As on the command line and in the lines.
        title: As in tables.
        framework: `"jax"` or `"torch"`.
        directions: What it can compute.
        absent: Why it cannot run here, or None.
        operator: Imports it and returns `(q, k, v, g, beta, initial_state, boundaries) -> (o, final_state)`.
        distributions: Packages whose versions belong to a result.
        arrange: From the common inputs to what the operator takes; outside the timing.
        restore: From the operator's results to the common form.
        calls: Calls in one replayed program.
        one_state: Whether it has one state for all sequences of this row.
        details: What it says about how it runs a row.
        environment: Variables to set before it is imported.
        compiles_on_call: Whether its first call compiles for long, so that it pays to make it in other processes first.
    """

    name: str
    title: str
    framework: str
    directions: tuple[str, ...]
    absent: Callable[[], str | None]
    operator: Callable[[], Callable[..., Any]]
    distributions: tuple[str, ...] = ()
    arrange: Callable[[Row, Any], Any] = _as_given
    restore: Callable[[Row, Mapping[str, np.ndarray]], Mapping[str, np.ndarray]] = _as_returned
    calls: Callable[[Row], int] = _several
    one_state: Callable[[Row], bool] = lambda row: False
    details: Callable[[Row], dict[str, Any]] = lambda row: {}
    environment: Mapping[str, str] | None = None
    compiles_on_call: bool = False

    def load(self) -> Callable[..., Any]:
        for name, value in (self.environment or {}).items():
            os.environ.setdefault(name, value)
        return self.operator()


def versions(distributions: tuple[str, ...]) -> dict[str, str]:
    """Installed versions; a package without metadata (unpacked by hand) is asked for its `__version__`."""
    found = {}
    for name in distributions:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            module = name.removesuffix("-python").replace("-", "_")
            if importlib.util.find_spec(module):
                found[name] = str(getattr(importlib.import_module(module), "__version__", "unknown"))
    return found


def _needs(*modules: str, torch_gpu: bool = False, jax_gpu: bool = False) -> Callable[[], str | None]:
    def absent() -> str | None:
        for module in modules:
            if importlib.util.find_spec(module) is None:
                return f"module {module} is not installed"
        if torch_gpu:
            import torch

            if not torch.cuda.is_available():
                return "torch sees no CUDA device"
        if jax_gpu:
            import jax

            if jax.default_backend() != "gpu":
                return "jax sees no CUDA device"
        return None

    return absent


# -- ours --------------------------------------------------------------------------------------------------------------


def _ours(implementation: str) -> Callable[[], Callable[..., Any]]:
    def operator() -> Callable[..., Any]:
        import jaxqla

        def op(q, k, v, g, beta, initial_state, cu_seqlens):
            return jaxqla.gated_delta(
                q,
                k,
                v,
                g,
                beta,
                initial_state=initial_state,
                return_final_state=True,
                cu_seqlens=cu_seqlens,
                implementation=implementation,
            )

        return op

    return operator


def _kernels_missing() -> str | None:
    from jaxqla import _launch

    return _needs(jax_gpu=True)() or (None if _launch.available_kernels() else "the kernels are not built")


def _explain(row: Row) -> dict[str, Any]:
    import jaxqla
    from benchmarks.inputs import abstract_inputs

    x = abstract_inputs(row, gradients=False)
    how = jaxqla.explain(*x[:5], initial_state=x.initial_state, return_final_state=True, cu_seqlens=x.cu_seqlens)
    return {"kernels": list(how.kernels), "backward_kernels": list(how.backward_kernels)}


# -- PyTorch peers -----------------------------------------------------------------------------------------------------


def _flash_qla() -> Callable[..., Any]:
    from flash_qla import chunk_gated_delta_rule  # pyright: ignore[reportMissingImports]

    def op(q, k, v, g, beta, initial_state, cu_seqlens):
        return chunk_gated_delta_rule(
            q, k, v, g, beta, initial_state=initial_state, output_final_state=True, cu_seqlens=cu_seqlens
        )

    return op


def _fla() -> Callable[..., Any]:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # pyright: ignore[reportMissingImports]

    def op(q, k, v, g, beta, initial_state, cu_seqlens):
        return chunk_gated_delta_rule(
            q, k, v, g, beta, initial_state=initial_state, output_final_state=True, cu_seqlens=cu_seqlens
        )

    return op


def _flashinfer() -> Callable[..., Any]:
    from flashinfer.gdn_prefill import chunk_gated_delta_rule  # pyright: ignore[reportMissingImports]

    def op(q, k, v, alpha, beta, initial_state, boundaries):
        cu_seqlens, max_seqlen = boundaries
        o, final_state = chunk_gated_delta_rule(
            q,
            k,
            v,
            alpha,
            beta,
            initial_state=initial_state,
            output_final_state=True,
            cu_seqlens=cu_seqlens,
            max_seqlen=max_seqlen,
        )
        return o[None], final_state

    return op


def _flashinfer_arrange(row: Row, inputs: Any) -> Any:
    """Its conventions: no row axis, the decay itself and not its logarithm, and a state of `[V, K]`."""
    return inputs._replace(
        q=inputs.q[0],
        k=inputs.k[0],
        v=inputs.v[0],
        g=inputs.g[0].exp(),
        beta=inputs.beta[0].contiguous(),
        initial_state=inputs.initial_state.transpose(-1, -2).contiguous(),
        cu_seqlens=(inputs.cu_seqlens, max(row.lengths)),
    )


def _flashinfer_restore(row: Row, results: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
    return {name: x.swapaxes(-1, -2) if name == "final_state" else x for name, x in results.items()}


# -- JAX peer ----------------------------------------------------------------------------------------------------------


def _jla() -> Callable[..., Any]:
    from jla import ops  # pyright: ignore[reportMissingImports]

    def op(q, k, v, g, beta, initial_state, segment_ids):
        return ops.linear_attention(
            "gated_deltanet",
            q,
            k,
            v,
            g=g,
            beta=beta,
            initial_state=initial_state,
            output_final_state=True,
            segment_ids=segment_ids,
            impl="mosaic_gpu",
        )

    return op


def _is_ragged(row: Row) -> bool:
    return len(set(row.lengths)) > 1


def _jla_arrange(row: Row, inputs: Inputs) -> Inputs:
    """It has no `cu_seqlens`: equal sequences become rows (the same memory), unequal ones get segment ids."""
    import jax.numpy as jnp

    def rows(x):
        return None if x is None else x.reshape(row.N, row.lengths[0], *x.shape[2:])

    if not _is_ragged(row):
        return Inputs(
            *map(rows, inputs[:5]),
            inputs.initial_state,
            None,
            rows(inputs.do),
            inputs.dfinal_state,  # pyright: ignore
        )
    ids = jnp.repeat(jnp.arange(1, row.N + 1, dtype=jnp.int32), jnp.asarray(row.lengths), total_repeat_length=row.T)
    dfinal_state = inputs.dfinal_state
    return inputs._replace(
        initial_state=inputs.initial_state[:1],
        cu_seqlens=ids[None],
        dfinal_state=None if dfinal_state is None else dfinal_state[-1:],
    )


def _jla_restore(row: Row, results: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
    states = ("final_state", "dinitial_state")
    return {name: x if name in states else x.reshape(1, row.T, *x.shape[2:]) for name, x in results.items()}


IMPLEMENTATIONS = {
    implementation.name: implementation
    for implementation in (
        Implementation(
            name="cuda",
            title="jaxqla",
            framework="jax",
            directions=DIRECTIONS,
            absent=_kernels_missing,
            operator=_ours("cuda"),
            distributions=("jax", "jaxlib"),
            details=_explain,
        ),
        Implementation(
            name="flashinfer",
            title="FlashInfer",
            framework="torch",
            directions=FORWARD_ONLY,
            absent=_needs("torch", "flashinfer", torch_gpu=True),
            operator=_flashinfer,
            distributions=("flashinfer-python", "torch", "nvidia-cutlass-dsl"),
            arrange=_flashinfer_arrange,
            restore=_flashinfer_restore,
        ),
        Implementation(
            name="flashqla",
            title="FlashQLA",
            framework="torch",
            directions=DIRECTIONS,
            absent=_needs("torch", "flash_qla", torch_gpu=True),
            operator=_flash_qla,
            distributions=("flash-qla", "torch", "tilelang"),
            compiles_on_call=True,
        ),
        Implementation(
            name="jla",
            title="jax-linear-attention",
            framework="jax",
            directions=DIRECTIONS,
            absent=_needs("jla", jax_gpu=True),
            operator=_jla,
            distributions=("jax-linear-attention", "jax"),
            arrange=_jla_arrange,
            restore=_jla_restore,
            one_state=_is_ragged,
            details=lambda row: {"note": "segment ids, one state for the row"} if _is_ragged(row) else {},
        ),
        Implementation(
            name="fla",
            title="FLA",
            framework="torch",
            directions=DIRECTIONS,
            absent=_needs("torch", "fla", torch_gpu=True),
            operator=_fla,
            distributions=("fla-core", "torch", "triton"),
            # Else FLA hands the call to FlashQLA where that is installed.
            environment={"FLA_FLASH_QLA": "0"},
            compiles_on_call=True,
        ),
        Implementation(
            name="xla",
            title="jaxqla, plain JAX",
            framework="jax",
            directions=DIRECTIONS,
            absent=_needs("jaxqla"),
            operator=_ours("xla"),
            distributions=("jax", "jaxlib"),
            # Long beside the gap between two programs, and its many operations are slow to compile several times over.
            calls=lambda row: 1,
        ),
    )
}
