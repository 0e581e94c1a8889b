"""The FFI library and the launch of kernels from JAX, as far as they go without a GPU: needs `make kernels`."""

import ctypes
import json
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxqla
from jaxqla import _launch, ops
from kernels import table
from kernels.build import ROOT, read_manifest
from kernels.toolchain import find_cxx

LIBRARY = _launch.LIB / "libjaxqla_ffi.so"


def test_everything_in_the_table_is_built_and_up_to_its_hash():
    import hashlib

    manifest = read_manifest(_launch.LIB)
    assert set(manifest["kernels"]) == {kernel.name for kernel in table.KERNELS}, "run make kernels"
    assert _launch.available_kernels() == set(manifest["kernels"])
    for entry in manifest["kernels"].values():
        cubin = (_launch.LIB / entry["cubin"]).read_bytes()
        assert hashlib.sha256(cubin).hexdigest() == entry["cubin_sha256"]
        assert entry["resources"]["spill_store_bytes"] == entry["resources"]["spill_load_bytes"] == 0


# -- the library -------------------------------------------------------------------------------------------------------


def test_it_loads_without_a_driver_and_has_two_handlers():
    library = ctypes.CDLL(str(LIBRARY))
    assert library.jaxqla_launch_initialize
    assert library.jaxqla_launch_execute


def test_it_is_linked_to_neither_cuda_nor_python():
    listed = subprocess.run(["readelf", "-d", str(LIBRARY)], capture_output=True, text=True, check=True).stdout
    needed = re.findall(r"NEEDED.*\[(.*)\]", listed)
    assert needed
    assert not [name for name in needed if re.match(r"lib(cuda|cudart|nvrtc|python)", name)]


READER = """
#include <iostream>
#include <iterator>

#include "launch_table.h"

// Reads a table, then prints for each kernel its grid for the dimensions given on the command line.
int main(int count, char** arguments) {
  const std::string text{std::istreambuf_iterator<char>(std::cin), {}};
  try {
    for (const auto& [name, kernel] : jaxqla::ReadTable(text)) {
      int64_t dims[jaxqla::kMaxDims] = {};
      for (int i = 1; i < count; ++i) dims[i - 1] = std::stoll(arguments[i]);
      std::cout << name << " " << kernel.num_operands << " " << kernel.num_results;
      for (const auto& axis : kernel.grid) {
        int64_t size = 0;
        std::cout << " " << (axis.Evaluate(dims, &size) ? std::to_string(size) : "overflow");
      }
      std::cout << "\\n";
    }
  } catch (const jaxqla::TableError& error) {
    std::cout << "refused: " << error.what() << "\\n";
  }
}
"""

TABLE = """jaxqla-launch-table 1
kernel f
cubin f.cubin
symbol f_kernel
buffer x float32 0 -1 2 N 128
buffer y float32 -1 0 1 N,1,+
dim N x 0 0
param buffer x
grid N,63,+,64,// N,N,* N,4,<,1,2,?
block 128 1 1
cluster 1 1 1
shared 0
overlap 0
cooperative 0
end
"""


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reader")
    (folder / "reader.cc").write_text(READER)
    program = folder / "reader"
    sources = [folder / "reader.cc", ROOT / "ffi" / "launch_table.cc"]
    subprocess.run([find_cxx(), "-std=c++20", f"-I{ROOT / 'ffi'}", *sources, "-o", program], check=True)

    def read(text, *dims):
        command = [str(program), *map(str, dims)]
        return subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout.strip()

    return read


@pytest.mark.parametrize(
    ("N", "grid"), [(0, "0 0 1"), (1, "1 1 1"), (65, "2 4225 2"), (2**40, "17179869184 overflow 2")]
)
def test_expressions_over_dimensions(reader, N, grid):
    assert reader(TABLE, N) == f"f 1 1 {grid}"


@pytest.mark.parametrize(
    ("line", "replacement", "message"),
    [
        ("jaxqla-launch-table 1", "jaxqla-launch-table 2", "line 1 must hold version 1, got 2"),
        ("dim N x 0 0", "dim N z 0 0", "line 7 must name a buffer, got z"),
        ("dim N x 0 0", "dim N x 2 0", "line 7 must hold a number in [0, 1], got 2"),
        (
            "buffer x float32 0 -1 2 N 128",
            "buffer x float31 0 -1 2 N 128",
            "line 5 must hold a known dtype, got float31",
        ),
        ("buffer y float32 -1 0 1 N,1,+", "buffer y float32 -1 1 1 N,1,+", "one buffer for each result"),
        ("block 128 1 1", "block 2048 1 1", "line 10 must hold a number in [1, 1024], got 2048"),
        ("block 128 1 1", "bloc 128 1 1", "line 10 must start with a known record, got bloc"),
        ("grid N,63,+,64,// N,N,* N,4,<,1,2,?", "grid M 1 1", "line 9"),
        ("grid N,63,+,64,// N,N,* N,4,<,1,2,?", "grid N,+ 1 1", "line 9"),
        ("end\n", "", "must end the kernel it started"),
    ],
)
def test_a_bad_table_is_refused_with_its_line(reader, line, replacement, message):
    assert line in TABLE
    answer = reader(TABLE.replace(line, replacement), 1)
    assert answer.startswith("refused: jaxqla launch table: ")
    assert message in answer


def test_the_built_table_is_read(reader):
    names = [line.split()[0] for line in reader((_launch.LIB / "launch_table.txt").read_text(), 1).splitlines()]
    assert names == sorted(kernel.name for kernel in table.KERNELS)


# -- from JAX ----------------------------------------------------------------------------------------------------------


def arguments(B=2, T=70, H=2, HV=4):
    array = jax.ShapeDtypeStruct
    bf16, f32 = jnp.bfloat16, jnp.float32
    tokens = [array((B, T, heads, 128), bf16) for heads in (H, H, HV)]
    return *tokens, array((B, T, HV), f32), array((B, T, HV), f32)


def lowered(function, *operands):
    return jax.jit(function).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()


PACKING = {
    "dense": {},
    "segment_ids": {"segment_ids": jax.ShapeDtypeStruct((1, 70), jnp.int32)},
    "cu_seqlens": {"cu_seqlens": jax.ShapeDtypeStruct((4,), jnp.int32)},
}


@pytest.mark.parametrize("packing", PACKING)
def test_a_call_lowers_to_the_two_kernels(packing, monkeypatch):
    monkeypatch.setattr(ops, "_cuda_capabilities", frozenset)

    def call(q, k, v, g, beta, options):
        return jaxqla.gated_delta(
            q, k, v, g, beta, implementation="cuda", scale=0.5, return_final_state=True, **options
        )

    text = lowered(call, *arguments(B=1), PACKING[packing])
    calls = re.findall(r"custom_call @jaxqla_launch_v1\(.*", text)
    assert [re.search(r'kernel = "(\w+)"', line)[1] for line in calls] == [
        "gdn_chunk_inverse_bf16",
        "gdn_fused_forward_bf16_v64",
    ]
    assert "scale = 5.000000e-01 : f32" in calls[1]
    sequences = 3 if packing == "cu_seqlens" else 1
    flags = 70 if packing == "segment_ids" else 0
    assert f"tensor<{70 // 64 + sequences}x4x64x64xbf16>" in calls[0]
    assert f"tensor<{sequences + 1}xi32>, tensor<{flags}xi32>" in calls[0]


def test_a_buffer_can_be_operand_and_result():
    def call(x):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return _launch.launch(table.KERNELS[0].name, (x,), (shape,), in_place={0: 0})[0]

    assert "output_operand_alias" in lowered(call, jax.ShapeDtypeStruct((3,), jnp.float32))


def test_an_unknown_kernel_is_refused_with_the_known_ones():
    with pytest.raises(
        ValueError, match=r"launch: kernel must be one of \['gdn_.*'gdn_chunk_inverse_bf16'.*got 'nothing'"
    ):
        _launch.launch("nothing", (), ())


def test_a_kernel_that_has_no_device_says_so():
    x = np.zeros(3, np.float32)
    with pytest.raises(Exception, match="jaxqla_launch_v1"):
        jax.block_until_ready(
            _launch.launch("gdn_chunk_inverse_bf16", (jnp.asarray(x),), (jax.ShapeDtypeStruct((3,), jnp.float32),))
        )


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """The launch module beside an empty folder of built files."""
    caches = (_launch.manifest, _launch.available_kernels, _launch._register)
    monkeypatch.setattr(_launch, "LIB", tmp_path)
    for function in caches:
        function.cache_clear()
    yield tmp_path
    for function in caches:
        function.cache_clear()


def test_nothing_built_means_no_kernels(elsewhere):
    assert _launch.available_kernels() == frozenset()
    assert "make kernels" in jaxqla.explain(*arguments()).reason
    with pytest.raises(RuntimeError, match="run make kernels or install the wheel"):
        _launch.launch("gdn_chunk_inverse_bf16", (), ())


def test_built_files_of_another_version_are_refused(elsewhere):
    (elsewhere / "manifest.json").write_text(json.dumps({"format": 0, "kernels": {}}))
    with pytest.raises(RuntimeError, match="must have format 1, got 0; run make kernels again"):
        _launch.available_kernels()


def test_a_broken_library_is_refused(elsewhere):
    (elsewhere / "libjaxqla_ffi.so").write_bytes(b"nothing")
    with pytest.raises(RuntimeError, match="does not load"):
        _launch._load()


def test_the_import_makes_the_kernels_known_to_loaded_programs():
    code = """
import jax
known = []
jax.ffi.register_ffi_target = lambda name, handlers, platform: known.append((name, sorted(handlers), platform))
import jaxqla
assert known == [("jaxqla_launch_v1", ["execute", "initialize"], "CUDA")], known
"""
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_a_broken_library_is_told_of_when_a_kernel_is_called(elsewhere):
    (elsewhere / "libjaxqla_ffi.so").write_bytes(b"nothing")
    _launch.register_if_built()
    with pytest.raises(RuntimeError, match="does not load"):
        _launch.launch("gdn_chunk_inverse_bf16", (), ())
