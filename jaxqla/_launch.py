"""Launches a built kernel from JAX: the FFI target, and what was built.

The handler is registered when jaxqla is imported, if it is built, so that a program exported elsewhere finds it.
It looks for the driver when a kernel runs, not before.
"""

import contextlib
import ctypes
import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxqla import _math

LIB = Path(__file__).with_name("lib")
TARGET = "jaxqla_launch_v1"
MANIFEST_FORMAT = 1


@functools.cache
def manifest() -> dict[str, Any]:
    """The manifest of the build: kernels, how they came about and what they use. Empty where nothing is built.

    Raises:
        RuntimeError: The built files are of another version of jaxqla.
    """
    path = LIB / "manifest.json"
    if not path.exists():
        return {}
    found = json.loads(path.read_text())
    if found.get("format") != MANIFEST_FORMAT:
        raise RuntimeError(
            f"jaxqla: {path} must have format {MANIFEST_FORMAT}, got {found.get('format')}; run make kernels again"
        )
    return found


@functools.cache
def available_kernels() -> frozenset[str]:
    """Names of the kernels that are built."""
    return frozenset(manifest().get("kernels", {}))


def launch(
    kernel: str,
    operands: Sequence[jax.Array],
    results: Sequence[jax.ShapeDtypeStruct],
    *,
    scalars: Mapping[str, np.generic] | None = None,
    in_place: Mapping[int, int] | None = None,
) -> list[jax.Array]:
    """Calls a kernel of the table.

    Args:
        kernel: Its name in the launch table.
        operands: Arrays, in the kernel's order.
        results: Shapes and dtypes of the results, in the kernel's order.
        scalars: Scalar parameters by name, as NumPy scalars of the kernel's types.
        in_place: Operands, by index, that share their buffer with a result; XLA copies one that is still needed.

    Raises:
        RuntimeError: Nothing is built, or the library does not load.
        ValueError: There is no such kernel.
    """
    _register()
    if kernel not in available_kernels():
        raise ValueError(f"launch: kernel must be one of {sorted(available_kernels())}, got {kernel!r}")
    types = [_varying_type(x, operands) for x in results]
    call = jax.ffi.ffi_call(TARGET, types, input_output_aliases=dict(in_place or {}))
    return list(call(*operands, kernel=kernel, **(scalars or {})))


def _varying_type(result: jax.ShapeDtypeStruct, operands: Sequence[jax.Array]) -> jax.ShapeDtypeStruct:
    """The type of a result inside a `shard_map`: it differs between devices wherever an operand does."""
    axes = _math.varying(*operands)
    if not axes:
        return result
    return jax.ShapeDtypeStruct(
        result.shape,
        result.dtype,
        manual_axis_type=jax.sharding.ManualAxisType(varying=frozenset(axes)),
        sharding=NamedSharding(jax.sharding.get_abstract_mesh(), PartitionSpec()),
    )


def register_if_built() -> None:
    """Registers the handler; a library that does not load is left for `launch` to tell of."""
    with contextlib.suppress(RuntimeError):
        _register()


@functools.cache
def _register() -> None:
    library = _load()
    handlers = {
        stage: jax.ffi.pycapsule(getattr(library, f"jaxqla_launch_{stage}")) for stage in ("initialize", "execute")
    }
    jax.ffi.register_ffi_target(TARGET, handlers, platform="CUDA")


def _load() -> ctypes.CDLL:
    path = LIB / "libjaxqla_ffi.so"
    if not path.exists():
        raise RuntimeError(f"jaxqla: {path} must exist; run make kernels or install the wheel")
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise RuntimeError(f"jaxqla: {path} does not load: {error}") from error
