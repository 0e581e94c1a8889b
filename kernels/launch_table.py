"""What the launcher must know of a kernel, and the text form in which it reads it.

The text is one record a line, fields apart by blanks; a kernel starts at `kernel` and stops at `end`. An expression is
one field in postfix form, its terms apart by commas: integers, dimension names, and the operators of OPERATORS. Format
version, first line: `jaxqla-launch-table VERSION`. The reader is ffi/launch_table.cc.
"""

from collections.abc import Iterable
from dataclasses import dataclass

VERSION = 1

# postfix operators: // and % round towards minus infinity; ? takes condition, then, else
OPERATORS = ("+", "-", "*", "//", "%", "min", "max", "<", "<=", "==", "?")

ABSENT = -1


@dataclass(frozen=True)
class Dim:
    """A dimension bound at launch: the size of one axis of one buffer, plus a constant."""

    name: str
    buffer: str
    axis: int
    offset: int


@dataclass(frozen=True)
class Buffer:
    """An operand, a result, or both; shape holds one expression an axis."""

    name: str
    dtype: str
    operand: int
    result: int
    shape: tuple[str, ...]


@dataclass(frozen=True)
class Scalar:
    """A value passed as an attribute of the call."""

    name: str
    dtype: str


@dataclass(frozen=True)
class TensorMap:
    """A recipe of cuTensorMapEncodeTiled: axes innermost first, strides in bytes and one fewer, enums as numbers."""

    name: str
    buffer: str
    data_type: int
    shape: tuple[str, ...]
    strides: tuple[str, ...]
    box: tuple[int, ...]
    element_strides: tuple[int, ...]
    interleave: int
    swizzle: int
    l2_promotion: int
    oob_fill: int


@dataclass(frozen=True)
class Param:
    """One parameter of the kernel: `map`, `buffer` or `scalar` names a record, `int32` or `int64` has an expression."""

    kind: str
    value: str


@dataclass(frozen=True)
class Launch:
    """Everything between the buffers of a call and cuLaunchKernelEx."""

    symbol: str
    dims: tuple[Dim, ...]
    buffers: tuple[Buffer, ...]
    scalars: tuple[Scalar, ...]
    tensor_maps: tuple[TensorMap, ...]
    params: tuple[Param, ...]
    grid: tuple[str, str, str]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    dynamic_shared_bytes: int
    waits_for_grid: bool
    """The kernel contains a grid-dependency wait, so its launch may overlap the end of the kernel before it."""
    cooperative: bool


def _line(*fields: object) -> str:
    return " ".join(str(field) for field in fields)


def _lines(name: str, cubin: str, launch: Launch) -> Iterable[str]:
    yield _line("kernel", name)
    yield _line("cubin", cubin)
    yield _line("symbol", launch.symbol)
    for buffer in launch.buffers:
        yield _line(
            "buffer", buffer.name, buffer.dtype, buffer.operand, buffer.result, len(buffer.shape), *buffer.shape
        )
    for dim in launch.dims:
        yield _line("dim", dim.name, dim.buffer, dim.axis, dim.offset)
    for scalar in launch.scalars:
        yield _line("scalar", scalar.name, scalar.dtype)
    for m in launch.tensor_maps:
        fields = (*m.shape, *m.strides, *m.box, *m.element_strides)
        enums = (m.interleave, m.swizzle, m.l2_promotion, m.oob_fill)
        yield _line("map", m.name, m.buffer, m.data_type, len(m.shape), *fields, *enums)
    for param in launch.params:
        yield _line("param", param.kind, param.value)
    yield _line("grid", *launch.grid)
    yield _line("block", *launch.block)
    yield _line("cluster", *launch.cluster)
    yield _line("shared", launch.dynamic_shared_bytes)
    yield _line("overlap", int(launch.waits_for_grid))
    yield _line("cooperative", int(launch.cooperative))
    yield "end"


def render(launches: Iterable[tuple[str, str, Launch]]) -> str:
    """Writes the table of (kernel name, cubin file, launch)."""
    lines = [_line("jaxqla-launch-table", VERSION)]
    for name, cubin, launch in launches:
        lines.extend(_lines(name, cubin, launch))
    return "\n".join(lines) + "\n"
