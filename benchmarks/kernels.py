"""Measures the kernels one by one: `python -m benchmarks.kernels`, one JSON line a kernel and row."""

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.floors import H200, Work
from benchmarks.inputs import Inputs, make_inputs, make_pool, num_sets
from benchmarks.lines import RESULTS, source_hash
from benchmarks.rows import CHUNK, Row, select
from benchmarks.timing import Settings, measure
from jaxqla import _cuda, _launch

ROWS = {
    "forward": ("tp1/4096x8", "sym/8192x4", "27b/1x16384"),
    "backward": ("hk16_hv32/32k_1seq", "hk16_hv32/8k_8seq", "hk4_hv8/32k_1seq"),
}
INVERSE = "gdn_chunk_inverse_bf16"
FUSED = {v_tile: f"gdn_fused_forward_bf16_v{v_tile}" for v_tile in (128, 64)}
COUPLING = "gdn_chunk_coupling_bf16"
STATES = "gdn_backward_states_bf16_v64"
GRADIENTS = "gdn_backward_gradients_bf16"


def inverse_work(row: Row) -> Work:
    """K K^T a key head and the merge of four blocks of 16; k, g, beta in, the inverse and the gates' sums out."""
    keys = row.num_chunks * row.H
    block = 2 * 16**3
    flops = keys * 2 * CHUNK * CHUNK * row.K + row.units * 16 * block
    return Work(flops, keys * 2 * CHUNK * row.K + row.units * (2 * CHUNK * CHUNK + 3 * 4 * CHUNK))


def fused_work(row: Row) -> Work:
    """Five products a chunk and value head, and the scores; q, k, v, the inverse and states in, o and states out."""
    keys = row.num_chunks * row.H
    scores = 2 * CHUNK * CHUNK * row.K
    flops = row.units * (3 * 2 * CHUNK * row.K * row.V + 2 * 2 * CHUNK * CHUNK * row.V + scores)
    bytes_ = row.units * (2 * 2 * CHUNK * row.V + 2 * CHUNK * CHUNK + 4 * CHUNK) + keys * 2 * 2 * CHUNK * row.K
    return Work(flops, bytes_ + row.items * 2 * 4 * row.K * row.V)


def states_work(row: Row) -> Work:
    """Two products with the state forward and three back, four of 64 tokens; v, do and twice Y in, dv and for each
    chunk two states and two rows out."""
    wide, narrow = 2 * CHUNK * row.K * row.V, 2 * CHUNK * CHUNK * row.V
    rows, states = 2 * CHUNK * row.V, 2 * row.K * row.V
    flops = row.units * (5 * wide + 4 * narrow)
    bytes_ = row.units * (5 * rows + 2 * 2 * CHUNK * CHUNK + 2 * states + 2 * 2 * 4 * CHUNK)
    return Work(flops, bytes_ + row.num_chunks * row.H * 3 * 2 * CHUNK * row.K + row.items * 3 * 4 * row.K * row.V)


def gradients_work(row: Row) -> Work:
    """Three products with states and six of 64 tokens; do and what the state passes left in, dq and dk out."""
    wide, narrow = 2 * CHUNK * row.K * row.V, 2 * CHUNK * CHUNK * row.V
    bytes_ = row.units * (3 * 2 * CHUNK * row.V + 2 * 2 * row.K * row.V + 4 * 4 * CHUNK)
    return Work(row.units * (3 * wide + 6 * narrow), bytes_ + row.num_chunks * row.H * 4 * 2 * CHUNK * row.K)


def packed(inputs: Inputs) -> _cuda.Packed:
    return _cuda.pack(*inputs.q.shape[:2], None, inputs.cu_seqlens)


def chunk_kernel(kernel: str) -> Callable[[Inputs], Any]:
    def call(inputs: Inputs) -> Any:
        return _cuda.chunk_inverse(inputs.k[0], inputs.g[0], inputs.beta[0], packed(inputs), kernel=kernel)

    return call


def fused(v_tile: int) -> Callable[[Inputs, Any], Any]:
    def call(inputs: Inputs, a: Any) -> Any:
        return _cuda.fused_forward(
            inputs.q[0],
            inputs.k[0],
            inputs.v[0],
            *a,
            packed(inputs),
            inputs.initial_state,
            scale=inputs.q.shape[-1] ** -0.5,
            return_final_state=True,
            kernel=FUSED[v_tile],
        )

    return call


def backward_states(inputs: Inputs, coupling: Any) -> Any:
    assert inputs.do is not None
    return _cuda.backward_states(
        inputs.q[0],
        inputs.k[0],
        inputs.v[0],
        inputs.do[0],
        *coupling,
        inputs.beta[0],
        packed(inputs),
        inputs.initial_state,
        inputs.dfinal_state,
        scale=inputs.q.shape[-1] ** -0.5,
        kernel=STATES,
    )


def backward_gradients(inputs: Inputs, coupling: Any, states: Any) -> Any:
    assert inputs.do is not None
    return _cuda.backward_gradients(
        inputs.q[0],
        inputs.k[0],
        inputs.do[0],
        states,
        coupling[1],
        inputs.beta[0],
        packed(inputs),
        scale=inputs.q.shape[-1] ** -0.5,
        kernel=GRADIENTS,
    )


def replayer(function: Callable[..., Any], operands: Sequence[Any]) -> Callable[[int], float]:
    """Runs a program of one call for each of `operands`."""
    program = jax.jit(lambda several: [function(*x) for x in several])
    jax.block_until_ready(program(operands))

    def replay(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            results = program(operands)
        jax.block_until_ready(results)
        return (time.perf_counter() - start) * 1e3

    return replay


def measured(row: Row, direction: str, settings: Settings) -> list[dict[str, Any]]:
    pool = make_pool([row], gradients=direction == "backward")
    sets = [make_inputs(pool, row, i) for i in range(max(3, num_sets(row)))]
    alone = [(x,) for x in sets]
    of_chunks = chunk_kernel(INVERSE if direction == "forward" else COUPLING)
    inverses = [jax.jit(of_chunks)(x) for x in sets]
    both = list(zip(sets, inverses, strict=True))
    if direction == "forward":
        cases = [(INVERSE, of_chunks, alone, inverse_work(row))]
        cases += [(FUSED[v_tile], fused(v_tile), both, fused_work(row)) for v_tile in FUSED]
    else:
        states = [jax.jit(backward_states)(*x) for x in both]
        all_three = [(*x, y) for x, y in zip(both, states, strict=True)]
        cases = [
            (COUPLING, of_chunks, alone, inverse_work(row)),
            (STATES, backward_states, both, states_work(row)),
            (GRADIENTS, backward_gradients, all_three, gradients_work(row)),
        ]
    return [line(row, *case, settings) for case in cases]


def line(
    row: Row, kernel: str, function: Any, operands: Sequence[Any], work: Work, settings: Settings
) -> dict[str, Any]:
    timing = measure(replayer(function, operands), len(operands), settings)
    entry = _launch.manifest()["kernels"][kernel]
    seconds = timing.median_ms / 1e3
    return {
        "row": row.name,
        "direction": "kernel",
        "kernel": kernel,
        "device": jax.devices()[0].device_kind,
        "sources": source_hash(),
        "timing": dataclasses.asdict(timing),
        "us_per_unit": timing.median_ms * 1e3 * H200.num_sms / row.units,
        "tflops": work.flops / seconds / 1e12,
        "gb_per_s": work.bytes / seconds / 1e9,
        "floor_ms": work.floor_ms(),
        "registers": entry["resources"]["registers"],
        "shared_bytes": entry["resources"]["static_shared_bytes"] + entry["launch"]["dynamic_shared_bytes"],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description="Measure the kernels one by one.")
    parser.add_argument("rows", nargs="*", help="rows, as for python -m benchmarks (default: three of each direction)")
    parser.add_argument("--direction", choices=list(ROWS), default="forward")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--target-ms", type=float, default=20.0)
    parser.add_argument("--out", type=Path, default=RESULTS / "kernels.jsonl")
    options = parser.parse_args(arguments)
    if jnp.zeros(()).device.platform != "gpu":
        print("benchmarks.kernels: jax must see a CUDA device, got none", file=sys.stderr)
        return 1
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with options.out.open("a") as file:
        for row in select(None, options.rows or ROWS[options.direction]):
            for x in measured(row, options.direction, Settings(repeats=options.repeats, target_ms=options.target_ms)):
                time_ms = x["timing"]["median_ms"]
                print(f"{x['row']:>18} {x['kernel']:>32} {time_ms:.4f} ms {x['us_per_unit']:.2f} us/unit/SM")
                file.write(json.dumps(x) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
