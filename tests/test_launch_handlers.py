"""The handlers of the FFI library, called as XLA calls them, with a driver that only records: needs `make kernels`.

The programs are ffi/testing/*.cc. Every call runs in a process of its own, as the library keeps what it has loaded.
"""

import os
import shutil
import subprocess
from pathlib import Path

import jax
import pytest

from jaxqla import _launch
from kernels.build import ROOT, WHEEL_FFI_API
from kernels.toolchain import find_cxx

LIBRARY = "libjaxqla_ffi.so"
INVALID_ARGUMENT, NOT_FOUND, FAILED_PRECONDITION, INTERNAL = 3, 5, 9, 13

TABLE = """jaxqla-launch-table 1
kernel f
cubin f.cubin
symbol f_kernel
buffer x bfloat16 0 -1 3 T H 128
buffer lengths int32 1 -1 1 N,1,+
buffer state float32 2 1 2 N 4
buffer y float32 -1 0 2 T H
dim T x 0 0
dim H x 1 0
dim N lengths 0 -1
scalar scale float32
scalar limit float64
map x_desc x 9 3 128 H T 256 H,256,* 64 1 32 1 1 1 0 3 2 0
param map x_desc
param buffer lengths
param buffer state
param buffer y
param scalar scale
param scalar limit
param int32 T
param int64 T,H,*,1000000000,*
grid N,T,1,min,* H 1
block 128 2 1
cluster 1 1 1
shared 24576
overlap 1
cooperative 0
end
kernel g
cubin g.cubin
symbol g_kernel
buffer y float32 -1 0 1 T
dim T y 0 0
param buffer y
grid T,63,+,64,// T 1
block 64 1 1
cluster 2 1 1
shared 0
overlap 0
cooperative 1
end
"""
PARAMS = "mpppfdil"


def call_f(T=70, H=3, N=2, *, stage="execute", device=0, replace=(), run="run"):
    """Commands of a call of f; `replace` holds pairs of a command's start and what to have there."""
    commands = [
        f"stage {stage}",
        f"device {device}",
        "string kernel f",
        "float32 scale 0.5",
        "float64 limit 0.25",
        f"operand bfloat16 3 {T} {H} 128",
        f"operand int32 1 {N + 1}",
        f"operand float32 2 {N} 4",
        f"result float32 2 {T} {H}",
        f"result float32 2 {N} 4",
        "same 2 1",
        run,
        "clear",
    ]
    for start, new in replace:
        assert any(command.startswith(start) for command in commands)
        commands = [new if command.startswith(start) else command for command in commands]
    return commands


def call_g(T):
    return ["stage execute", "string kernel g", f"result float32 1 {T}", "run", "clear"]


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("programs")
    testing = ROOT / "ffi" / "testing"
    include = ["-isystem", jax.ffi.include_dir()]
    compiler = [find_cxx(), "-std=c++20", "-O1", "-Wall", "-Wextra", "-Werror"]
    subprocess.run(
        [*compiler, *include, testing / "call_handlers.cc", "-ldl", "-pthread", "-o", folder / "call_handlers"],
        check=True,
    )
    driver = folder / "driver" / "libcuda.so.1"
    driver.parent.mkdir()
    subprocess.run([*compiler, "-fPIC", "-shared", testing / "recording_driver.cc", "-o", driver], check=True)
    return folder


@pytest.fixture
def run(programs, tmp_path):
    """Runs commands beside a copy of the library with the table and cubins above; gives the lines of the answer."""
    shutil.copy(_launch.LIB / LIBRARY, tmp_path)
    (tmp_path / "launch_table.txt").write_text(TABLE)
    for name in "fg":
        (tmp_path / f"{name}.cubin").write_text(f"image of {name}")

    def call(*calls, driver: Path | None = programs / "driver", **settings):
        environment = {**os.environ, "RECORD_PARAMS": PARAMS, **settings, "LD_LIBRARY_PATH": str(driver)}
        done = subprocess.run(
            [programs / "call_handlers", tmp_path / LIBRARY],
            input="\n".join(command for commands in calls for command in commands),
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.splitlines()

    call.folder = tmp_path
    return call


def of(lines, name):
    """What was asked of one function of the driver."""
    return [line.partition(" ")[2] for line in lines if line.split(" ")[0] == name]


def refused(lines, code, message):
    assert lines[-1] == f"{code} jaxqla: {message}"
    assert not of(lines, "cuLaunchKernelEx")


def test_what_registration_asks(run):
    api = ".".join(map(str, WHEEL_FFI_API))
    initialize, execute = run(["metadata"])
    assert initialize.startswith(f"initialize api {api} ")
    assert execute == f"execute api {api} traits 1", "1 is what lets XLA capture the call into a graph"


# -- a driver or none --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["initialize", "execute"])
def test_without_a_driver_a_call_is_refused(run, stage):
    # A file that is no library stands in the way of the system's driver, if there is one.
    (run.folder / "libcuda.so.1").write_text("nothing")
    (line,) = run(call_f(stage=stage), driver=run.folder)
    assert line.startswith(f"{FAILED_PRECONDITION} jaxqla: f: needs an NVIDIA driver: ")
    assert "libcuda.so.1" in line


def test_without_a_device_a_call_is_refused(run):
    refused(
        run(call_f(), RECORD_INIT="100"),
        FAILED_PRECONDITION,
        "f: needs an NVIDIA driver: cuInit gave CUDA_ERROR_NO_DEVICE",
    )


def test_an_old_driver_is_refused(run, programs):
    source, folder = run.folder / "old.cc", run.folder / "old"
    folder.mkdir()
    source.write_text('extern "C" int cuInit(unsigned) { return 0; }')
    subprocess.run([find_cxx(), "-shared", "-fPIC", source, "-o", folder / "libcuda.so.1"], check=True)
    (line,) = run(call_f(), driver=folder)
    assert line.startswith(f"{FAILED_PRECONDITION} jaxqla: f: needs an NVIDIA driver: libcuda.so.1 lacks cu")


def test_another_architecture_is_refused(run):
    lines = run(call_f(stage="initialize"), RECORD_CAPABILITIES="80")
    refused(lines, FAILED_PRECONDITION, "f: compute capability must be 9.0, got 8.0")


def test_another_architecture_beside_a_hopper_is_refused(run):
    calls = [call_f(stage="initialize", device=device) for device in (0, 1)]
    lines = run(*calls, RECORD_CAPABILITIES="90 100")
    assert "ok" in lines
    refused(lines, FAILED_PRECONDITION, "f: compute capability must be 9.0, got 10.0")


@pytest.mark.parametrize(
    "function",
    ["cuLibraryLoadData", "cuLibraryGetKernel", "cuKernelSetAttribute", "cuKernelGetFunction", "cuFuncLoad"],
)
def test_a_driver_that_refuses_is_quoted(run, function):
    lines = run(call_f(stage="initialize"), RECORD_FAIL=function)
    refused(lines, INTERNAL, f"f: {function.removeprefix('cu')} gave CUDA_ERROR_INVALID_VALUE")
    assert of(lines, "cuCtxPopCurrent") == ["then -1"]


@pytest.mark.parametrize("function", ["cuTensorMapEncodeTiled", "cuLaunchKernelEx"])
def test_a_launch_that_the_driver_refuses_is_quoted(run, function):
    lines = run(call_f(), RECORD_FAIL=function)
    assert lines[-1] == f"{INTERNAL} jaxqla: f: {function.removeprefix('cu')} gave CUDA_ERROR_INVALID_VALUE"
    assert len(of(lines, "cuCtxPushCurrent")) == len(of(lines, "cuCtxPopCurrent"))


# -- loading -----------------------------------------------------------------------------------------------------------


def test_a_kernel_is_loaded_once_a_process_and_readied_once_a_device(run):
    calls = [call_f(stage="initialize", device=device) for device in (1, 0, 1, 0)]
    lines = run(*calls, call_f(), call_f(device=1))
    assert of(lines, "cuLibraryLoadData") == ["image of f"]
    assert of(lines, "cuLibraryGetKernel") == ["f_kernel"]
    assert of(lines, "cuKernelSetAttribute") == ["8=24576 device 1", "8=24576 device 0"]
    assert of(lines, "cuKernelGetFunction") == ["device 1", "device 0"]
    assert of(lines, "cuFuncLoad") == ["device 1", "device 0"]
    assert lines.count("ok") == 6


def test_after_initialize_execute_only_encodes_and_launches(run):
    first, second = call_f(stage="initialize"), call_f()
    before = run(first)
    lines = run(first, second)[len(before) :]
    assert [line.split(" ")[0] for line in lines] == [
        "cuTensorMapEncodeTiled",
        "cuCtxPushCurrent",
        "cuLaunchKernelEx",
        "cuCtxPopCurrent",
        "ok",
    ]


def test_threads_share_one_load(run):
    lines = run(call_f(stage="initialize", run="run 8"), call_f(run="run 8"), RECORD_SLOW="200")
    assert len(of(lines, "cuLibraryLoadData")) == len(of(lines, "cuKernelSetAttribute")) == 1
    assert len(of(lines, "cuLaunchKernelEx")) == 8
    assert lines.count("ok") == 16


def test_a_call_runs_on_its_own_device(run):
    lines = run(call_f(device=3))
    assert of(lines, "cuLaunchKernelEx")[0].startswith("device 3,3 stream 0xabc0 ")


@pytest.mark.parametrize("device", [-1, 64])
def test_device_ordinals_have_bounds(run, device):
    message = f"f: device ordinal must be in [0, 64), got {device}"
    refused(run(call_f(device=device)), INVALID_ARGUMENT, message)
    refused(run(call_f(device=device, stage="initialize")), INVALID_ARGUMENT, message)


def test_missing_files_are_named(run):
    (run.folder / "f.cubin").unlink()
    refused(
        run(call_f(stage="initialize")),
        FAILED_PRECONDITION,
        f"f: jaxqla: {run.folder / 'f.cubin'} must be readable",
    )
    (run.folder / "launch_table.txt").unlink()
    refused(run(call_f()), FAILED_PRECONDITION, f"{run.folder / 'launch_table.txt'} must be readable")


def test_a_bad_table_is_refused_at_the_call(run):
    (run.folder / "launch_table.txt").write_text(TABLE.replace("launch-table 1", "launch-table 2"))
    (line,) = run(call_f())
    assert line == f"{FAILED_PRECONDITION} jaxqla launch table: line 1 must hold version 1, got 2."


def test_unknown_kernels_are_refused(run):
    lines = run(call_f(replace=[("string", "string kernel h")]))
    refused(lines, NOT_FOUND, "h: must be in the launch table")
    lines = run(call_f(replace=[("string", "string name f")]))
    refused(lines, INVALID_ARGUMENT, "launch: attribute kernel must be a string")


# -- what is launched --------------------------------------------------------------------------------------------------


def test_a_launch_passes_maps_buffers_scalars_and_dimensions(run):
    lines = run(call_f(T=70, H=3, N=2))
    assert of(lines, "cuTensorMapEncodeTiled") == [
        "type 9 address 0x1000 shape 128,3,70 strides 256,768 box 64,1,32 steps 1,1,1 enums 0,3,2,0"
    ]
    assert of(lines, "cuLaunchKernelEx") == [
        "device 0,0 stream 0xabc0 grid 2,3,1 block 128,2,1 shared 24576 attributes 6=1"
        " params map1 0x2000 0x3000 0x100000 0.5 0.25 70 210000000000"
    ]


def test_clusters_and_cooperation_are_asked_for_and_overlap_is_not(run):
    lines = run(call_g(130), RECORD_PARAMS="p")
    assert of(lines, "cuLaunchKernelEx") == [
        "device 0,0 stream 0xabc0 grid 3,130,1 block 64,1,1 shared 0 attributes 2=1 4=2x1x1 params 0x100000"
    ]


@pytest.mark.parametrize("empty", [{"T": 0}, {"N": 0}, {"H": 0}])
def test_an_empty_grid_launches_nothing(run, empty):
    lines = run(call_f(**empty))
    assert lines == ["ok"]


def test_an_empty_buffer_is_never_encoded(run):
    text = TABLE.replace("grid N,T,1,min,* H 1", "grid N 1 1")
    (run.folder / "launch_table.txt").write_text(text)
    lines = run(call_f(T=0))
    assert not of(lines, "cuTensorMapEncodeTiled")
    assert of(lines, "cuLaunchKernelEx")[0].endswith("params map0 0x2000 0x3000 0 0.5 0.25 0 0")


# -- what is checked ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("operand bf", "operand float16 3 70 3 128"), "x must have dtype bfloat16, got float16"),
        (("operand int32", "operand int64 1 3"), "lengths must have dtype int32, got int64"),
        (("operand int32", "operand bool 1 3"), "lengths must have dtype int32, got a dtype no kernel takes"),
        (("operand bf", "operand bfloat16 2 70 128"), "x must have 3 dimensions, got shape (70, 128)"),
        (("operand bf", "operand bfloat16 3 70 3 64"), "x must have 128 = 128 on axis 2, got shape (70, 3, 64)"),
        (("result float32 2 70", "result float32 2 3 70"), "y must have T = 70 on axis 0, got shape (3, 70)"),
        (("result float32 2 70", "result float32 2 70 4"), "y must have H = 3 on axis 1, got shape (70, 4)"),
        (("result float32 2 2", "result float32 2 3 4"), "state must have N = 2 on axis 0, got shape (3, 4)"),
        (("same", ""), "state must be one buffer as operand and result, got two"),
        (("operand int32", "operand int32 1 0"), "N must be in [0, 2^31), got -1"),
        (("same", "operand float32 1 5"), "call must have 3 operands and 2 results, got 4 and 2"),
        (("result float32 2 2", ""), "call must have 3 operands and 2 results, got 3 and 1"),
        (("float32 scale", "float64 scale 0.5"), "attribute scale must be float32"),
        (("float64 limit", ""), "attribute limit must be float64"),
    ],
)
def test_a_call_that_does_not_fit_the_table_is_refused(run, change, message):
    dropped = [("same", "")] if change[0] == "result float32 2 2" and not change[1] else []
    refused(run(call_f(replace=[change, *dropped])), INVALID_ARGUMENT, f"f: {message}")


def test_sizes_beyond_a_launch_are_refused(run):
    lines = run(call_f(T=2**31, H=1))
    refused(lines, INVALID_ARGUMENT, f"f: T must be in [0, 2^31), got {2**31}")
    lines = run(call_f(T=1, H=65536))
    refused(lines, INVALID_ARGUMENT, "f: grid axis 1 = H must be in [0, 65535], got 65536")
    text = TABLE.replace("param int32 T", "param int32 T,H,*")
    (run.folder / "launch_table.txt").write_text(text)
    lines = run(call_f(T=2**30, H=2))
    refused(lines, INVALID_ARGUMENT, f"f: parameter T,H,* must fit its type, got {2**31}")
