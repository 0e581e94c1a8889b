"""Packed rows: documents of many lengths laid end to end give what each gives alone, and take a fraction of the time.

Three ways to the same outputs: a call for each document, a batch padded to the longest, and packed rows. The last two
differ only in where the documents are.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxqla

# Few long documents among many short ones, as texts are; a GPU gets them `GPU_SCALE` times as long.
LENGTHS = (600, 25, 90, 25, 90, 25, 90, 90, 25, 25, 90, 25, 25, 90, 25, 90, 25, 25, 90, 25, 90, 25, 90, 25)
GPU_SCALE = 16
# Largest difference, as a share of the largest output.
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}
RUNS = 5
Place = tuple[int, slice]


def first_fit(lengths: Sequence[int], row_length: int) -> list[Place]:
    """The row and the tokens in it of each document: the longest first, each to the first row with room for it."""
    used: list[int] = []
    places: dict[int, Place] = {}
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        row = next((row for row, n in enumerate(used) if n + lengths[i] <= row_length), len(used))
        if row == len(used):
            used.append(0)
        places[i] = row, slice(used[row], used[row] + lengths[i])
        used[row] += lengths[i]
    return [places[i] for i in range(len(lengths))]


def lay_out(documents: Sequence[np.ndarray], places: Sequence[Place], row_length: int) -> np.ndarray:
    """Rows of documents at their places, `[rows, row_length, ...]`; zeros are padding."""
    rows = np.zeros((1 + max(row for row, _ in places), row_length, *documents[0].shape[1:]), documents[0].dtype)
    for x, (row, tokens) in zip(documents, places, strict=True):
        rows[row, tokens] = x
    return rows


def make_document(length: int, seed: int, *, H: int, HV: int, K: int, V: int, dtype: str) -> dict[str, np.ndarray]:
    """Random inputs of one document, `[length, ...]`."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal((length, *shape), np.float32)

    inputs = {"q": normal(H, K), "k": normal(H, K), "v": normal(HV, V)}
    inputs = {name: np.asarray(x, jnp.dtype(dtype)) for name, x in inputs.items()}
    return inputs | {"g": -np.log1p(np.exp(-normal(HV) - 3)), "beta": 1 / (1 + np.exp(-normal(HV)))}


def seconds_of(call: Callable[[], object]) -> float:
    """Median seconds of a call that has been compiled."""
    times = []
    for _ in range(RUNS):
        begin = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def main() -> None:
    """Compares the three ways, in values and in time; fails if they differ."""
    on_cpu = jax.default_backend() == "cpu"
    lengths = [n if on_cpu else n * GPU_SCALE for n in LENGTHS]
    sizes = {"H": 2, "HV": 4, "K": 48, "V": 64} if on_cpu else {"H": 16, "HV": 32, "K": 128, "V": 128}
    dtype = "float32" if on_cpu else "bfloat16"
    documents = [make_document(n, i, **sizes, dtype=dtype) for i, n in enumerate(lengths)]

    @jax.jit
    def gated_delta(inputs: dict[str, Any], segment_ids: jax.Array | None) -> jax.Array:
        return jaxqla.gated_delta(**inputs, segment_ids=segment_ids, qk_l2norm=True)[0]

    longest, total = max(lengths), sum(lengths)
    single = [jax.device_put({name: x[None] for name, x in document.items()}) for document in documents]

    def one_by_one() -> list[jax.Array]:
        return [gated_delta(inputs, None) for inputs in single]

    alone = [np.asarray(o[0], np.float32) for o in one_by_one()]
    largest = max(np.abs(x).max() for x in alone)
    results = [("one by one", f"{len(lengths)} calls", total, seconds_of(one_by_one))]
    for label, places in (
        ("padded", [(i, slice(0, n)) for i, n in enumerate(lengths)]),
        ("packed", first_fit(lengths, longest)),
    ):
        # 1, 2, 3, ... for the documents, 0 for padding: it neither reads nor writes a state, and its output is 0.
        numbers = [np.full(n, i, np.int32) for i, n in enumerate(lengths, 1)]
        ids = lay_out(numbers, places, longest)
        rows = {name: lay_out([document[name] for document in documents], places, longest) for name in documents[0]}
        inputs, segment_ids = jax.device_put((rows, ids))
        o = np.asarray(gated_delta(inputs, segment_ids), np.float32)
        error = max(np.abs(o[row, tokens] - x).max() for x, (row, tokens) in zip(alone, places, strict=True))
        print(f"{label} and alone differ by at most {error:.1e}; outputs are up to {largest:.2f}")
        if not error <= TOLERANCE[dtype] * largest:
            raise AssertionError(f"packing: {label} and alone must differ by at most {TOLERANCE[dtype]:.0e} of that")
        if np.any(o[ids == 0]):
            raise AssertionError("packing: the output at padding must be 0")
        seconds = seconds_of(lambda inputs=inputs, segment_ids=segment_ids: gated_delta(inputs, segment_ids))
        results.append((label, f"{ids.shape[0]} x {longest}", ids.size, seconds))
    print(f"{len(lengths)} documents of {min(lengths)} to {longest} tokens, {total:,} in all, forward on {dtype}:")
    for label, shape, places, seconds in results:
        print(
            f"    {label:10s} {shape:>9s} {places:9,} places {seconds * 1e3:9.2f} ms {total / seconds:12,.0f} tokens/s"
        )
    (_, _, _, single_time), (_, _, _, padded), (_, _, _, packed) = results
    print(f"packed is {padded / packed:.1f} times as fast as padded, {single_time / packed:.1f} times as one by one")


if __name__ == "__main__":
    main()
