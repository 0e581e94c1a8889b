"""How a call is split over devices: by rows and by heads, never by tokens or widths, and with no collective added.

H and HV are split together: a shard has whole groups, value head `h` beside its key head `h // (HV // H)`. Fewer key
heads than shards cannot be split, since each device would hold a part of the gradient of one. Who decides differs by
context:

* inside the user's `shard_map` the arrays are local already, and the body runs on them;
* with Explicit axes the types of the arrays say how they are split, and `shard_map` follows them;
* with Auto axes the compiler decides, and asks `custom_partitioning` for the rule.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxqla import _math
from jaxqla._checks import message


class Kind(NamedTuple):
    """What the axes of an array are: letters as in the contract, `h` key heads, `hr` value heads.

    `...` stands for rows, of which there may be several axes where the call is mapped.
    """

    axes: tuple[str, ...]

    @property
    def rows(self) -> bool:
        """Whether its leading axes are rows."""
        return self.axes[0] == "..."


QK = Kind(("...", "t", "h", "k"))
V = Kind(("...", "t", "hr", "v"))
GATE = Kind(("...", "t", "hr"))
STATE = Kind(("...", "hr", "k", "v"))
IDS = Kind(("...", "t"))
# With cu_seqlens the only row cannot be split, and states are those of sequences.
PACKED_STATE = Kind(("n", "hr", "k", "v"))
BOUNDARIES = Kind(("m",))

Body = Callable[..., tuple[jax.Array, ...]]


def vary_together(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Types arrays inside a `shard_map` as differing over the same axes; a replicated one gets the sum of gradients."""
    return [_math.vary_like(x, *arrays) for x in arrays]


def split(body: Body, arrays: Sequence[jax.Array], kinds: Sequence[Kind], results: Sequence[Kind]) -> Any:
    """Runs `body` on the shard of each device.

    Args:
        body: From local arrays to local results; the same object for the same work, so that it is compiled once.
        arrays: The operands, q and v at the places of their kinds.
        kinds: Their kinds.
        results: The kinds of what `body` gives; one of them is `V`.
    """
    kinds, results = tuple(kinds), tuple(results)
    q, v = arrays[kinds.index(QK)], arrays[kinds.index(V)]
    H, HV = q.shape[-2], v.shape[-2]
    context = jax.sharding.get_abstract_mesh()
    if manual := manual_axes():
        others = [axis for axis in context.axis_names if axis not in manual and context.shape[axis] > 1]
        if others:
            rule = f"make every mesh axis manual (manual: {manual}); name all of them in axis_names"
            raise ValueError(message("gated_delta", "shard_map", rule, f"{others} left out"))
        return body(*arrays)
    mesh = jax.typeof(v).sharding.mesh
    types = [] if mesh.empty else list(zip(mesh.axis_names, mesh.axis_types, strict=True))
    explicit = tuple(axis for axis, kind in types if kind == AxisType.Explicit)
    if not explicit:
        partitioned = _partitioned(body, kinds, results, H, HV)
        # The TPU compiler has no custom partitioning; plain JAX is split there as any other program.
        return lax.platform_dependent(*arrays, tpu=body, default=partitioned)
    rows, heads = _rows_and_heads(jax.typeof(v).sharding.spec, v.ndim)
    _check_heads(mesh, heads, H, HV)
    in_specs, out_specs = (tuple(_spec(kind, rows, heads) for kind in x) for x in (kinds, results))
    place = (lambda spec: NamedSharding(mesh, spec)) if context.empty else (lambda spec: spec)
    arrays = [jax.sharding.reshard(x, place(spec)) for x, spec in zip(arrays, in_specs, strict=True)]
    if any(kind == AxisType.Auto for _, kind in types):
        out = tuple(map(place, out_specs))
        partitioned = _partitioned(body, kinds, results, H, HV)
        return jax.sharding.auto_axes(partitioned, axes=explicit, out_sharding=out)(*arrays)
    return jax.shard_map(
        body,
        mesh=None if not context.empty else mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names=set(explicit),
    )(*arrays)


def manual_axes() -> list[str]:
    """The mesh axes of the `shard_map` that is being traced, if any."""
    mesh = jax.sharding.get_abstract_mesh()
    return [axis for axis, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Manual]


def _rows_and_heads(spec: P, ndim: int) -> tuple[tuple, Any]:
    """How the rows and the value heads of an array like v are split."""
    full = (*spec, *[None] * (ndim - len(spec)))
    return full[: ndim - 3], full[ndim - 2]


def _spec(kind: Kind, rows: tuple, heads: Any) -> P:
    lead = rows if kind.rows else ()
    return P(*lead, *(heads if axis in ("h", "hr") else None for axis in kind.axes if axis != "..."))


def _check_heads(mesh: Any, heads: Any, H: int, HV: int) -> None:
    axes = heads if isinstance(heads, tuple) else (heads,) if heads is not None else ()
    size = math.prod(mesh.shape[axis] for axis in axes)
    if H % size:
        rule = (
            f"have heads that the mesh axes {axes} of size {size} divide; use a smaller axis, or repeat q and k to"
            f" the HV = {HV} heads of v"
        )
        raise ValueError(message("gated_delta", "q", rule, f"H = {H}"))


@functools.cache
def _partitioned(body: Body, kinds: tuple[Kind, ...], results: tuple[Kind, ...], H: int, HV: int) -> Callable[..., Any]:
    """`body` with a rule for the compiler."""
    packed = BOUNDARIES in kinds
    words = {"hr": "(h r)" if 1 < H < HV else "h" if H > 1 else "r", "...": "b" if packed else "..."}

    def text(several: tuple[Kind, ...]) -> str:
        return ", ".join(" ".join(words.get(axis, axis) for axis in kind.axes) for kind in several)

    rule = f"{text(kinds)} -> {text(results)}"
    # Shardy wants them in the order in which they appear.
    names = dict.fromkeys(rule.replace("->", " ").replace(",", " ").replace("(", " ").replace(")", " ").split())
    split = ("...", "h", "r") if H > 1 else ("...",)
    whole = tuple(name for name in names if name not in split)
    sizes = {"r": HV // H} if 1 < H < HV else {}
    function = custom_partitioning(jax.jit(body))  # its constants stay inside

    def partition(mesh: Any, _: Any, shapes: Any) -> Any:
        # The decision is on the results; operands still carry what they came with.
        out = shapes[results.index(V)]
        if not isinstance(out.sharding, NamedSharding):
            # Several devices, but no argument of the program names a mesh: jax.set_mesh and arrays of one device.
            if not out.sharding.is_fully_replicated:
                rule = "be split over a mesh that jax knows; pass arguments with a NamedSharding, or use shard_map"
                raise ValueError(message("gated_delta", "v", rule, str(out.sharding)))
            return mesh, body, (out.sharding,) * len(results), (out.sharding,) * len(kinds)
        rows, heads = _rows_and_heads(out.sharding.spec, len(out.shape))
        _check_heads(mesh, heads, H, HV)
        shardings = [tuple(NamedSharding(mesh, _spec(kind, rows, heads)) for kind in x) for x in (results, kinds)]
        return mesh, body, *shardings

    function.def_partition(
        partition=partition, sharding_rule=lambda *_: (rule, {"need_replication_factors": whole, **sizes})
    )
    return function
