"""`python -m jaxqla` prints the environment, the devices, the built kernels and what is supported."""

import importlib.metadata
import platform
from collections.abc import Iterable, Mapping
from typing import Any

import jax

import jaxqla
from jaxqla import _checks, _launch


def support_matrix(kernels: Iterable[Mapping[str, Any]]) -> str:
    """Renders what runs where as a Markdown table.

    Args:
        kernels: The facts of each kernel, with at least `name`, `dtype`, `K` and `V`: the rows of the kernel table, or
            those of the manifest made from it.
    """
    # The forward needs every kernel of a dtype and width; a width is listed once, whatever the tiles.
    widths: dict[str, set[tuple[int, int]]] = {}
    for kernel in kernels:
        widths.setdefault(kernel["dtype"], set()).add((kernel["K"], kernel["V"]))
    lines = [
        "| q, k, v | K, V | NVIDIA Hopper (compute capability 9.0) | other GPUs, TPU, CPU |",
        "| --- | --- | --- | --- |",
    ]
    for dtype in _checks.INPUT_DTYPES:
        for K, V in sorted(widths.get(dtype, ())):
            lines.append(f"| {dtype} | {K}, {V} | kernels, forward and backward | plain JAX |")
        lines.append(f"| {dtype} | {'any other' if dtype in widths else 'any'} | plain JAX | plain JAX |")
    return "\n".join(lines)


def main() -> None:
    """Prints the report."""
    print(f"jaxqla {jaxqla.__version__}")
    print(f"  Python {platform.python_version()} on {platform.platform()}")
    for name in ("jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin"):
        print(f"  {name} {_version(name)}")
    print("devices")
    for line in _devices():
        print(f"  {line}")
    print("kernels")
    for line in _kernels():
        print(f"  {line}")
    print("support")
    for line in support_matrix(_kernel_rows()).splitlines():
        print(f"  {line}")


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _devices() -> list[str]:
    try:
        devices = jax.local_devices()
    except RuntimeError as error:
        return [f"none: {error}"]
    return [
        f"{device}: {device.device_kind}, compute capability {getattr(device, 'compute_capability', 'none')}"
        for device in devices
    ]


def _kernel_rows() -> list[dict[str, Any]]:
    return [entry["kernel"] for entry in _launch.manifest().get("kernels", {}).values()]


def _kernels() -> list[str]:
    return [f"{row['name']}: {row['dtype']}, K {row['K']}, V {row['V']}" for row in _kernel_rows()] or ["none"]


if __name__ == "__main__":
    main()
