"""How a call is split over devices: by rows and by heads, never by tokens or widths, and with no collective added.

H and HV are split together: a shard has whole groups, value head `h` beside its key head `h // (HV // H)`. Fewer key
heads than shards cannot be split, since each device would hold a part of the gradient of one. Who decides differs by
context:

* inside the user's `shard_map` the arrays are local already, and the body runs on them;
* with Explicit axes the types of the arrays say how they are split, and `shard_map` follows them;
* with Auto axes the compiler decides, and asks `custom_partitioning` for the rule;
* where the call names a mesh and its axes, `shard_map` follows these, and tokens may be split too.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
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

# Of the arguments and results of the op.
ARRAYS = (QK, QK, V, GATE, GATE, STATE, IDS, BOUNDARIES)
RESULTS = (V, STATE)

EXPLICIT = AxisType.Explicit
Body = Callable[..., tuple[jax.Array, ...]]


class Placement(NamedTuple):
    """A mesh, and the axes over which rows, heads and tokens are split; no axes for those that are not."""

    mesh: Mesh | AbstractMesh
    rows: tuple[str, ...]
    heads: tuple[str, ...]
    tokens: str | None


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
    if mesh.empty and EXPLICIT in context.axis_types:
        # Arrays of one device where a mesh is set: the call is not split, and runs on each device of the mesh.
        mesh, types = context, [(axis, EXPLICIT) for axis in context.axis_names]
    explicit = tuple(axis for axis, kind in types if kind == EXPLICIT)
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


def placement_on(mesh: Any, axes: dict[str, tuple[Any, str, int]]) -> Placement | None:
    """Checks a mesh that a caller names, and the axes of it; None without a mesh.

    Args:
        mesh: The mesh.
        axes: By the arguments `batch_axis`, `head_axis` and `sequence_axis`: the axes, and the letter and the size of
            what they split.

    Raises:
        TypeError: `mesh` is none.
        ValueError: Axes without a mesh, axes that it lacks or that come twice, or sizes that they do not divide.
    """
    function = "gated_delta"
    named = {argument: _names(given) for argument, (given, _, _) in axes.items()}
    if mesh is None:
        for argument, names in named.items():
            if names:
                raise ValueError(message(function, argument, "be None where mesh is None", repr(axes[argument][0])))
        return None
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise TypeError(message(function, "mesh", "be a jax.sharding.Mesh or None", type(mesh).__name__))
    if manual := manual_axes():
        raise ValueError(message(function, "mesh", f"be None inside shard_map (manual: {manual})", mesh.axis_names))
    seen = []
    for argument, names in named.items():
        given, letter, size = axes[argument]
        for name in names:
            if name not in mesh.axis_names or name in seen:
                rule = f"name axes of the mesh {mesh.axis_names}, each once"
                raise ValueError(message(function, argument, rule, repr(given)))
            seen.append(name)
        parts = math.prod(mesh.shape[name] for name in names)
        if size % parts:
            raise ValueError(message(function, argument, f"have a size that divides {letter} = {size}", parts))
    tokens = axes["sequence_axis"][0] if "sequence_axis" in axes else None
    return Placement(mesh, named["batch_axis"], named["head_axis"], tokens)


def over_mesh(function: Callable[..., Any], placement: Placement, arrays: Sequence[jax.Array | None]) -> Any:
    """Runs the op `function` on each device's part of its arguments.

    Args:
        function: From local arguments, None for those that are not there, to `(o, final_state)`.
        placement: The mesh and its axes.
        arrays: The arguments, of kinds `ARRAYS`.
    """
    mesh, rows, heads, tokens = placement
    packed = arrays[-1] is not None
    given = [i for i, x in enumerate(arrays) if x is not None]

    def spec(kind: Kind) -> P:
        kind = PACKED_STATE if packed and kind is STATE else kind
        return _spec(kind, (rows or None,), heads or None, tokens)

    def local(*given_arrays: jax.Array) -> Any:
        rest = dict(zip(given, given_arrays, strict=True))
        return function(*(rest.get(i) for i in range(len(arrays))))

    there: list[Any] = [arrays[i] for i in given]
    in_specs = tuple(spec(ARRAYS[i]) for i in given)
    if explicit := {axis for axis, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == EXPLICIT}:
        # shard_map takes only what is split over these as it says.
        there = [
            jax.sharding.reshard(x, NamedSharding(mesh, _over(spec, explicit)))
            for x, spec in zip(there, in_specs, strict=True)
        ]
    out_specs = tuple(spec(kind) for kind in RESULTS)
    return jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=out_specs)(*there)


def manual_axes() -> list[str]:
    """The mesh axes of the `shard_map` that is being traced, if any."""
    mesh = jax.sharding.get_abstract_mesh()
    return [axis for axis, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Manual]


def _rows_and_heads(spec: P, ndim: int) -> tuple[tuple, Any]:
    """How the rows and the value heads of an array like v are split."""
    full = (*spec, *[None] * (ndim - len(spec)))
    return full[: ndim - 3], full[ndim - 2]


def _over(spec: P, axes: set[str]) -> P:
    """The part of a spec that speaks of these axes."""
    return P(*(tuple(name for name in _names(names) if name in axes) or None for names in spec))


def _names(axes: Any) -> tuple[str, ...]:
    return () if axes is None else tuple(axes) if isinstance(axes, tuple | list) else (axes,)


def _spec(kind: Kind, rows: tuple, heads: Any, tokens: Any = None) -> P:
    lead = rows if kind.rows else ()
    split = {"h": heads, "hr": heads, "t": tokens}
    return P(*lead, *(split.get(axis) for axis in kind.axes if axis != "..."))


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
