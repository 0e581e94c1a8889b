"""Names for the axes of parameters and activations, and the mesh axes that they go to."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax
from flax import nnx
from flax.core.spmd import get_logical_axis_rules
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from jaxqla._checks import message

MESH_AXES = ("data", "fsdp", "tensor")

# Rows over data and fsdp; parameters over fsdp by the model's width; heads, the wide axis of an MLP and the vocabulary
# over tensor. GDN heads are key heads: value heads, gates and convolution channels go with them.
LOGICAL_RULES: dict[str, str | tuple[str, ...] | None] = {
    "batch": ("data", "fsdp"),
    "embed": "fsdp",
    "gdn_heads": "tensor",
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "vocab": "tensor",
    "experts": None,
    "layers": None,
}


def make_mesh(*, data: int = 1, fsdp: int = 1, tensor: int = 1) -> Mesh:
    """Makes a mesh of Auto axes `data`, `fsdp` and `tensor` from the first `data * fsdp * tensor` devices.

    Raises:
        ValueError: There are fewer devices than that.
    """
    count = data * fsdp * tensor
    if count > len(jax.devices()):
        got = f"data = {data}, fsdp = {fsdp}, tensor = {tensor} with {len(jax.devices())} devices"
        raise ValueError(message("make_mesh", "data * fsdp * tensor", "be at most the number of devices", got))
    devices = jax.devices()[:count]
    return jax.make_mesh((data, fsdp, tensor), MESH_AXES, axis_types=(AxisType.Auto,) * 3, devices=devices)


@contextmanager
def use_mesh(
    mesh: Mesh,
    *,
    sizes: Mapping[str, int] | None = None,
    rules: Mapping[str, str | tuple[str, ...] | None] = LOGICAL_RULES,
) -> Iterator[Mesh]:
    """A context in which modules are created on the mesh, and run on it.

    Args:
        mesh: Of axes of any names; rules for axes that it does not have mean replication. The axes are Auto: the
            layers leave to the compiler where results of products go, which Explicit axes would want to be told.
        sizes: Sizes of logical axes, as `QwenConfig.axis_sizes()` gives them: an axis that the mesh does not divide,
            such as two key-value heads over four devices, is replicated. `gdn_heads` is not forgiven: it raises.
        rules: From logical axis to mesh axes.

    Raises:
        ValueError: The mesh does not divide `gdn_heads`.
    """
    resolved: dict[str, tuple[str, ...] | None] = {}
    for name, axes in rules.items():
        there = tuple(axis for axis in ((axes,) if isinstance(axes, str) else axes or ()) if axis in mesh.shape)
        size = math.prod(mesh.shape[axis] for axis in there)
        if sizes and name in sizes and sizes[name] % size:
            if name == "gdn_heads":
                rule = f"divide the {sizes[name]} key heads of the gated delta layers"
                raise ValueError(message("use_mesh", f"the mesh axes {there}", rule, size))
            there = ()
        resolved[name] = there or None
    with jax.set_mesh(mesh), nnx.logical_axis_rules(tuple(resolved.items())):
        yield mesh


def axes(*names: str | None) -> dict[str, Any]:
    """Metadata of a parameter whose axes have these names; on a mesh it is placed as it is created."""
    return {"out_sharding": names, "eager_sharding": not jax.sharding.get_abstract_mesh().empty}


def constrain(x: jax.Array, *names: str | None) -> jax.Array:
    """`x`, split over the mesh in use as its named axes say; without a mesh, or inside `shard_map`, `x` as it is.

    An axis that the mesh does not divide is left whole.
    """
    if not in_use():
        return x
    mesh, spec = jax.sharding.get_abstract_mesh(), partition(x.shape, *names)
    if all(kind == AxisType.Explicit for kind in mesh.axis_types):
        return jax.sharding.reshard(x, spec)
    return jax.lax.with_sharding_constraint(x, spec)


def in_use() -> bool:
    """Whether there is a mesh that arrays may be split over: none inside `shard_map`, where they are."""
    mesh = jax.sharding.get_abstract_mesh()
    return not mesh.empty and AxisType.Manual not in mesh.axis_types


def partition(shape: tuple[int, ...], *names: str | None) -> P:
    """How an array whose axes have these names is split over the mesh in use; axes it does not divide are whole."""
    mesh, rules = jax.sharding.get_abstract_mesh(), dict(get_logical_axis_rules())

    def placed(name: str | None, size: int):
        axes = rules.get(name) if name else None
        axes = (axes,) if isinstance(axes, str) else axes
        return axes if axes and size % math.prod(mesh.shape[axis] for axis in axes) == 0 else None

    return P(*(placed(name, size) for name, size in zip(names, shape, strict=True)))
