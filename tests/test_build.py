"""The build: what it refuses, what it builds again, and what the parts of the project must agree on."""

import dataclasses
import hashlib
import importlib
import json
import re
import sys

import pytest

from jaxqla import _cuda, _dispatch

# make test runs these in the environment that builds the kernels; users' environments have no TileLang.
pytest.importorskip("tilelang")

from kernels import build, offsets, sass, table, tiles, toolchain
from kernels.launch_table import Buffer

BUILDER = '''
"""A kernel that adds."""

import tilelang.language as T


def add(dtype: str, step: int = 1):
    N = T.dynamic("N")

    @T.prim_func
    def add_kernel(x: T.Tensor((N,), dtype), y: T.Tensor((N,), dtype)):
        with T.Kernel(T.ceildiv(N, 128), threads=128) as block:
            thread = T.get_thread_binding()
            if block * 128 + thread < N:
                y[block * 128 + thread] = x[block * 128 + thread] + step

    return add_kernel
'''


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", range(7510, 7516))
def test_serialised_wgmma_is_refused(number):
    log = f"ptxas info    : (C{number}) Potential Performance Loss: wgmma.mma_async instructions are serialized"
    with pytest.raises(build.BuildError, match=f"C{number}"):
        build.check_log(f"ptxas info : 0 bytes gmem\n{log}\n")


def test_ignored_register_limits_are_refused():
    with pytest.raises(build.BuildError, match="setmaxnreg ignored"):
        build.check_log("ptxas info    : (C7508) setmaxnreg ignored; unable to determine register count at entry")


def test_other_remarks_pass():
    build.check_log("ptxas info    : (C7516) something else\nptxas info    : Used 96 registers")


def test_too_much_shared_memory_is_refused():
    build.check_shared(1024, 226 * 1024)
    with pytest.raises(build.BuildError, match=r"<= 232448 bytes, got 1024 \+ 232448"):
        build.check_shared(1024, 227 * 1024)


SPILL = """
	.text.kernel:
        /*0000*/                   MOV R1, c[0x0][0x28] ;
        {before}
.L_x_1:
        /*0020*/                   FADD R2, R2, R3 ;
        {inside}
        /*0040*/               @P0 BRA `(.L_x_1) ;
        /*0050*/                   EXIT ;
"""


def test_a_spill_in_a_loop_is_found_and_one_before_it_is_not():
    load, nothing = "/*0010*/                   LDL R0, [R1] ;", ""
    assert sass.local_memory_in_loops(SPILL.format(before=load, inside=nothing)) == []
    assert sass.local_memory_in_loops(SPILL.format(before=nothing, inside=load)) == ["LDL R0, [R1]"]


def test_spills_and_registers_are_read_off_the_log():
    log = (
        "ptxas info    : Function properties for f\n"
        "    16 bytes stack frame, 12 bytes spill stores, 8 bytes spill loads\n"
        "ptxas info    : Used 80 registers, used 2 barriers, 1024 bytes smem\n"
    )
    assert toolchain.read_ptxas_log(log, "f") == toolchain.Resources(80, 2, 1024, 16, 12, 8)
    with pytest.raises(toolchain.ToolError, match="must speak of g"):
        toolchain.read_ptxas_log(log, "g")


@pytest.mark.parametrize(
    ("offset", "fault"),
    [
        ("((int64_t)i) * ((int64_t)n)", None),
        ("(((int64_t)i) * ((int64_t)n)) - (int64_t)64", None),
        ("i * n", "32-bit offset"),
        ("((int64_t)i) + (int64_t)-2147483648", "negative constant"),
        ("((int64_t)i) + (int64_t)3000000000", "above 2^31"),
    ],
)
def test_offsets_that_wrap_are_found(offset, fault):
    source = f'extern "C" __global__ void f(float* x, int n) {{ x[{offset}] = 0; }}'
    found = offsets.wrapped_offsets(source, "f", [Buffer("x", "float32", 0, -1, ("N", "M"))])
    assert [fault in text for text in found] == ([True] if fault else [])


# -- what is built, and when -------------------------------------------------------------------------------------------


@pytest.fixture
def toy(tmp_path, monkeypatch):
    package = tmp_path / "toykernels"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "add.py").write_text(BUILDER)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield package / "add.py"
    for name in [name for name in sys.modules if name.startswith("toykernels")]:
        del sys.modules[name]


def test_only_what_changed_is_built_again(toy, tmp_path):
    out = tmp_path / "lib"
    kernel = table.Kernel(
        name="add", builder="toykernels.add:add", operands=("x",), results=("y",), dtype="float32", pass_configs={}
    )
    first = build.build([kernel], out)
    assert first["built"] == ["add"], first["failed"]
    entry = first["manifest"]["kernels"]["add"]
    assert entry["cubin_sha256"] == hashlib.sha256((out / entry["cubin"]).read_bytes()).hexdigest()
    assert json.loads((out / "manifest.json").read_text())["kernels"]["add"] == json.loads(json.dumps(entry))
    assert "buffer x float32 0 -1 1 N" in (out / "launch_table.txt").read_text()
    assert build.build([kernel], out)["built"] == []
    assert build.build([dataclasses.replace(kernel, options={"step": 2})], out)["built"] == ["add"]
    toy.write_text(BUILDER.replace("A kernel that adds", "A kernel that adds a step"))
    importlib.invalidate_caches()
    assert build.build([dataclasses.replace(kernel, options={"step": 2})], out)["built"] == ["add"]
    broken = dataclasses.replace(kernel, options={"no_such_option": 1})
    outcome = build.build([broken], out)
    assert "no_such_option" in outcome["failed"]["add"]
    assert not list(out.glob("*.cubin"))


def test_unknown_names_are_refused_with_the_known_ones(tmp_path):
    with pytest.raises(build.BuildError, match="gdn_chunk_inverse_bf16"):
        build.build(table.KERNELS, tmp_path, only=["gdn_backward"])


def test_a_key_depends_on_sources_options_and_tools():
    kernel = table.KERNELS[0]
    tools = {"nvcc": "13.0.88"}
    key = build.kernel_key(kernel, tools)
    assert build.kernel_key(kernel, tools) == key
    assert build.kernel_key(kernel, {"nvcc": "13.1.0"}) != key
    assert build.kernel_key(dataclasses.replace(kernel, V=64), tools) != key
    names = {path.name for path in build.source_files(kernel.builder)}
    assert {"chunk_inverse.py", "tiles.py", "tiles.cuh", "lowering.py"} <= names


# -- what must agree ---------------------------------------------------------------------------------------------------


def test_the_choice_of_path_knows_the_kernels_of_the_table():
    names = {kernel.name for kernel in table.KERNELS}
    assert {kernel.dtype for kernel in table.KERNELS} == set(_dispatch.KERNEL_DTYPES)
    assert {(kernel.K, kernel.V) for kernel in table.KERNELS} == {(_dispatch.KERNEL_WIDTH,) * 2}
    for suffix in _dispatch.KERNEL_DTYPES.values():
        assert f"gdn_chunk_inverse_{suffix}" in names
        assert {f"gdn_fused_forward_{suffix}_v{v_tile}" for v_tile in table.V_TILES} <= names


def test_both_sides_count_chunks_and_flags_alike():
    assert tiles.CHUNK == _cuda.CHUNK
    assert (tiles.PAD, tiles.TOKEN, tiles.RESET) == (_cuda._PAD, _cuda._TOKEN, _cuda._RESET)


def test_the_gate_that_erases_is_zero_in_float32_and_keeps_sums_exact_enough():
    assert 2.0**tiles.MIN_LOG2_GATE < 2.0**-149
    assert re.search(r"MIN_LOG2_GATE = -160", (build.ROOT / "kernels" / "tiles.py").read_text())
