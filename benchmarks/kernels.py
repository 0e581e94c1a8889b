"""Measures the kernels of the forward one by one: `python -m benchmarks.kernels`, one JSON line a kernel and row."""

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

ROWS = ("tp1/4096x8", "sym/8192x4", "27b/1x16384")
INVERSE = "gdn_chunk_inverse_bf16"
FUSED = {v_tile: f"gdn_fused_forward_bf16_v{v_tile}" for v_tile in (128, 64)}


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


def packed(inputs: Inputs) -> _cuda.Packed:
    return _cuda.pack(*inputs.q.shape[:2], None, inputs.cu_seqlens)


def inverse(inputs: Inputs) -> Any:
    return _cuda.chunk_inverse(inputs.k[0], inputs.g[0], inputs.beta[0], packed(inputs), kernel=INVERSE)


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


def measured(row: Row, settings: Settings) -> list[dict[str, Any]]:
    pool = make_pool([row], gradients=False)
    sets = [make_inputs(pool, row, i)._replace(do=None, dfinal_state=None) for i in range(max(3, num_sets(row)))]
    inverses = [jax.jit(inverse)(inputs) for inputs in sets]
    both = list(zip(sets, inverses, strict=True))
    cases = [(INVERSE, inverse, [(x,) for x in sets], inverse_work(row))]
    cases += [(FUSED[v_tile], fused(v_tile), both, fused_work(row)) for v_tile in FUSED]
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
    parser.add_argument("rows", nargs="*", default=list(ROWS), help="rows, as for python -m benchmarks")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--target-ms", type=float, default=20.0)
    parser.add_argument("--out", type=Path, default=RESULTS / "kernels.jsonl")
    options = parser.parse_args(arguments)
    if jnp.zeros(()).device.platform != "gpu":
        print("benchmarks.kernels: jax must see a CUDA device, got none", file=sys.stderr)
        return 1
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with options.out.open("a") as file:
        for row in select(None, options.rows):
            for x in measured(row, Settings(repeats=options.repeats, target_ms=options.target_ms)):
                time_ms = x["timing"]["median_ms"]
                print(f"{x['row']:>18} {x['kernel']:>32} {time_ms:.4f} ms {x['us_per_unit']:.2f} us/unit/SM")
                file.write(json.dumps(x) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
