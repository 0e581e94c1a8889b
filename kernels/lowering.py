"""Lowers one kernel of the table with TileLang, on any machine, and reads from its host function how to launch it."""

import contextlib
import importlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tilelang.cuda import transform as cuda_transform
from tilelang.engine.lower import lower as lower_module
from tilelang.env import CUTLASS_INCLUDE_DIR, TILELANG_TEMPLATE_PATH
from tvm import arith, ir, tirx
from tvm.ir.transform import PassContext, Sequential
from tvm.target import Target
from tvm.tirx.stmt_functor import post_order_visit

from kernels.launch_table import ABSENT, Buffer, Dim, Launch, Param, Scalar, TensorMap

AXES = ("x", "y", "z")
# Packed calls of the host function that the launcher does in its own way.
HANDLED_CALLS = frozenset({"__tvm_set_device"})
SCALAR_DTYPES = frozenset({"float32", "float64", "int32", "int64"})


class LoweringError(Exception):
    """A kernel does something that the launcher has no record for."""


@dataclass(frozen=True)
class Lowered:
    """CUDA source of one kernel and how to launch it."""

    source: str
    launch: Launch


def load_builder(path: str) -> Callable[..., Any]:
    """Imports `package.module:function`."""
    module, _, function = path.partition(":")
    return getattr(importlib.import_module(module), function)


def build_prim_func(kernel: Any) -> Any:
    """Calls the builder with the kernel's options, and with dtype, K and V where it has such parameters."""
    builder = load_builder(kernel.builder)
    known = inspect.signature(builder).parameters
    facts = {name: getattr(kernel, name) for name in ("dtype", "K", "V") if name in known}
    return builder(**{**facts, **kernel.options})


def include_folders() -> list[str]:
    """Where nvcc finds the headers that lowered kernels include."""
    return [TILELANG_TEMPLATE_PATH, CUTLASS_INCLUDE_DIR]


def lower(kernel: Any, target: dict[str, str]) -> Lowered:
    """Lowers `kernel` (see kernels.table.Kernel) for `target`; needs no GPU."""
    resolved = Target(target)
    prim_func = build_prim_func(kernel)
    with PassContext(opt_level=3, config=kernel.pass_configs), resolved, _own_fences():
        artifact = lower_module(prim_func, resolved)
    device = _only(artifact.device_mod, "device function")
    host = _only(artifact.host_mod, "host function")
    return Lowered(artifact.kernel_source, _read_launch(kernel, prim_func, device, host))


@contextlib.contextmanager
def _own_fences() -> Iterator[None]:
    """Leaves out TileLang's proxy fences: it puts one, 100 cycles long, before each WGMMA that follows an extern call.

    The kernels place the fences that they need.
    """
    original = cuda_transform.InjectFenceProxy
    cuda_transform.InjectFenceProxy = lambda: Sequential([])
    try:
        yield
    finally:
        cuda_transform.InjectFenceProxy = original


def _only(module: Any, what: str) -> Any:
    functions = [function for _, function in module.functions.items()]
    if len(functions) != 1:
        raise LoweringError(f"a builder must give 1 {what}, got {len(functions)}")
    return functions[0]


def _read_launch(kernel: Any, prim_func: Any, device: Any, host: Any) -> Launch:
    symbol = str(device.attrs["global_symbol"])
    tir_buffers = {b.data.name: b for b in (prim_func.buffer_map.get(p) for p in prim_func.params) if b is not None}
    scalars = tuple(Scalar(p.name, str(p.dtype)) for p in prim_func.params if p not in prim_func.buffer_map)
    if unknown := [s for s in scalars if s.dtype not in SCALAR_DTYPES]:
        raise LoweringError(f"scalars must be one of {sorted(SCALAR_DTYPES)}, got {unknown}")
    dims = _bind_dims(tir_buffers)
    names = {dim.name for dim in dims}
    maps, arguments = _host_calls(host, symbol, len(device.params), names)
    attrs = dict(device.attrs.items())
    if "l2_persistent_map" in dict(host.attrs.items()):
        raise LoweringError("L2 persistence windows are not in the launch table")
    extent = dict(attrs.get("thread_extent", {}).items())
    grid = tuple(_postfix(extent.get(f"blockIdx.{axis}", 1), names) for axis in AXES)
    block = tuple(int(extent.get(f"threadIdx.{axis}", 1)) for axis in AXES)
    cluster = tuple(int(x) for x in attrs.get("cluster_dims", (1, 1, 1)))
    return Launch(
        symbol=symbol,
        dims=dims,
        buffers=_buffers(kernel, tir_buffers, names),
        scalars=scalars,
        tensor_maps=tuple(maps.values()),
        params=tuple(_param(a, maps, tir_buffers, scalars, names) for a in arguments),
        grid=grid,
        block=block,
        cluster=cluster + (1,) * (3 - len(cluster)),
        dynamic_shared_bytes=int(attrs.get("dyn_shared_memory_buf", 0)),
        waits_for_grid="has_cuda_pdl_sync" in attrs,
        cooperative=bool(attrs.get("use_cooperative_groups", False)),
    )


def _buffers(kernel: Any, tir_buffers: dict[str, Any], names: set[str]) -> tuple[Buffer, ...]:
    operands, results = tuple(kernel.operands), tuple(kernel.results)
    listed = set(operands) | set(results)
    if listed != set(tir_buffers):
        raise LoweringError(
            f"operands and results must be the buffer parameters {sorted(tir_buffers)}, got {sorted(listed)}"
        )
    both = set(operands) & set(results)
    if both != set(kernel.in_place):
        raise LoweringError(
            f"in_place must name what is operand and result {sorted(both)}, got {sorted(kernel.in_place)}"
        )

    def place(of: tuple[str, ...], name: str) -> int:
        return of.index(name) if name in of else ABSENT

    return tuple(
        Buffer(
            name, str(b.dtype), place(operands, name), place(results, name), tuple(_postfix(x, names) for x in b.shape)
        )
        for name, b in tir_buffers.items()
    )


def _bind_dims(tir_buffers: dict[str, Any]) -> tuple[Dim, ...]:
    """Finds for each symbol an axis whose size is the symbol plus a constant; bare symbols first."""
    analyzer = arith.Analyzer()
    symbols: dict[str, Any] = {}
    bound: dict[str, Dim] = {}
    for name, buffer in tir_buffers.items():
        for axis, size in enumerate(buffer.shape):
            found = []
            post_order_visit(tirx.Evaluate(size), lambda node, found=found: found.append(node))
            free = {node.name: node for node in found if isinstance(node, tirx.Var)}
            symbols.update(free)
            if len(free) != 1:
                continue
            ((symbol, var),) = free.items()
            offset = analyzer.simplify(var - size)
            if not isinstance(offset, tirx.IntImm):
                continue
            dim = Dim(symbol, name, axis, int(offset))
            if symbol not in bound or (bound[symbol].offset and not dim.offset):
                bound[symbol] = dim
    if missing := sorted(set(symbols) - set(bound)):
        raise LoweringError(f"dimensions {missing} must each be the size of an axis, plus a constant at most")
    return tuple(bound.values())


def _host_calls(host: Any, symbol: str, num_params: int, names: set[str]) -> tuple[dict[str, TensorMap], list[Any]]:
    """Reads the tensor-map recipes and the arguments of the device function from the host function's packed calls."""
    maps: dict[str, TensorMap] = {}
    launches: list[list[Any]] = []

    def visit(node: Any) -> None:
        if not isinstance(node, tirx.Call) or node.op != ir.Op.get("tirx.tvm_call_packed"):
            return
        callee = str(getattr(node.args[0], "value", node.args[0]))
        if callee == "__tvm_tensormap_create_tiled":
            recipe = _tensor_map(list(node.args[1:]), names)
            maps[recipe.name] = recipe
        elif callee == symbol:
            launches.append(list(node.args[1 : 1 + num_params]))
        elif callee not in HANDLED_CALLS:
            raise LoweringError(f"the host function calls {callee}, which is not in the launch table")

    post_order_visit(host.body, visit)
    if len(launches) != 1:
        raise LoweringError(f"the host function must launch once, got {len(launches)} launches")
    return maps, launches[0]


def _tensor_map(args: list[Any], names: set[str]) -> TensorMap:
    handle, data_type, rank, pointer, *rest = args
    rank = int(rank)
    shape, strides, box, element_strides = (rest[i * rank : (i + 1) * rank] for i in range(4))
    interleave, swizzle, l2_promotion, oob_fill = (int(x) for x in rest[4 * rank :])
    return TensorMap(
        name=handle.name,
        buffer=pointer.name,
        data_type=int(data_type),
        shape=tuple(_postfix(x, names) for x in shape),
        # the first is the size of an element, which the driver takes from the data type
        strides=tuple(_postfix(x, names) for x in strides[1:]),
        box=tuple(int(x) for x in box),
        element_strides=tuple(int(x) for x in element_strides),
        interleave=interleave,
        swizzle=swizzle,
        l2_promotion=l2_promotion,
        oob_fill=oob_fill,
    )


def _param(
    argument: Any, maps: dict[str, TensorMap], buffers: dict[str, Any], scalars: tuple[Scalar, ...], names: set[str]
) -> Param:
    if isinstance(argument, tirx.Var):
        if argument.name in maps:
            return Param("map", argument.name)
        if argument.name in buffers:
            return Param("buffer", argument.name)
        if argument.name in {scalar.name for scalar in scalars}:
            return Param("scalar", argument.name)
    dtype = str(argument.dtype)
    if dtype not in ("int32", "int64"):
        raise LoweringError(f"a computed kernel parameter must be int32 or int64, got {argument} of {dtype}")
    return Param(dtype, _postfix(argument, names))


_BINARY = {
    tirx.Add: "+",
    tirx.Sub: "-",
    tirx.Mul: "*",
    tirx.FloorDiv: "//",
    tirx.FloorMod: "%",
    # sizes are not negative, so both roundings agree
    tirx.Div: "//",
    tirx.Mod: "%",
    tirx.Min: "min",
    tirx.Max: "max",
    tirx.LT: "<",
    tirx.LE: "<=",
    tirx.EQ: "==",
}


def _postfix(expr: Any, names: set[str]) -> str:
    """Writes an integer expression over dimensions in postfix form."""
    if isinstance(expr, int):
        return str(expr)
    if isinstance(expr, tirx.IntImm):
        return str(int(expr))
    if isinstance(expr, tirx.Var):
        if expr.name not in names:
            raise LoweringError(f"{expr.name} is not a dimension of a buffer")
        return expr.name
    if isinstance(expr, tirx.Cast):
        return _postfix(expr.value, names)  # the launcher computes in int64
    if operator := _BINARY.get(type(expr)):
        return f"{_postfix(expr.a, names)},{_postfix(expr.b, names)},{operator}"
    if isinstance(expr, (tirx.GT, tirx.GE)):
        return f"{_postfix(expr.b, names)},{_postfix(expr.a, names)},{'<' if isinstance(expr, tirx.GT) else '<='}"
    if isinstance(expr, tirx.Select):
        parts = (expr.condition, expr.true_value, expr.false_value)
        return ",".join(_postfix(part, names) for part in parts) + ",?"
    if isinstance(expr, tirx.Call):
        name = expr.op.name
        if name == "tirx.if_then_else":
            return ",".join(_postfix(part, names) for part in expr.args) + ",?"
        if name in ("tirx.shift_left", "tirx.shift_right") and isinstance(expr.args[1], tirx.IntImm):
            operator = "*" if name == "tirx.shift_left" else "//"
            return f"{_postfix(expr.args[0], names)},{1 << int(expr.args[1])},{operator}"
    raise LoweringError(f"the launch table has no operator for {expr} ({type(expr).__name__})")
