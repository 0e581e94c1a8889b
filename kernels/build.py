"""Builds the kernels of the table and the FFI library: `python -m kernels.build`. Needs no GPU.

Writes into jaxqla/lib one SASS cubin a kernel, launch_table.txt (what ffi/ reads), manifest.json (what jaxqla reads,
and how each file came about) and libjaxqla_ffi.so. A kernel is built again only when its key changes: the text of its
builder's modules and of the CUDA sources beside them, its options, the tools' versions.
"""

import argparse
import ast
import contextlib
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import json
import multiprocessing
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from kernels import offsets, sass, toolchain
from kernels.hopper import HOPPER
from kernels.launch_table import Buffer, Dim, Launch, Param, Scalar, TensorMap, render

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "jaxqla" / "lib"
LIBRARY = "libjaxqla_ffi.so"
MANIFEST = "manifest.json"
TABLE = "launch_table.txt"
MANIFEST_FORMAT = 1
# The FFI interface of the oldest jaxlib we support; a wheel must be built against it, see hatch_build.py.
WHEEL_FFI_API = (0, 3)

CUDA_SUFFIXES = (".cuh", ".cu", ".h", ".hpp")
# Modules of the build whose text decides what a kernel becomes.
BUILD_MODULES = ("kernels.launch_table", "kernels.lowering", "kernels.toolchain")
CXX_OPTIONS = [
    "-std=c++20",
    "-O2",
    "-fPIC",
    "-shared",
    "-fvisibility=hidden",
    "-fvisibility-inlines-hidden",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-Wl,-z,defs",
    "-Wl,--exclude-libs,ALL",
    "-Wl,--build-id=none",
]


class BuildError(Exception):
    """A kernel was compiled and is not fit to be shipped, or could not be compiled."""


# ---- keys: what a built file depends on


def _digest(parts: Iterable[bytes | str]) -> str:
    state = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        state.update(len(data).to_bytes(8, "little"))
        state.update(data)
    return state.hexdigest()


def _module_path(name: str) -> Path | None:
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        return None
    return Path(spec.origin) if spec and spec.origin and spec.origin.endswith(".py") else None


def _imports(path: Path, package: str) -> set[str]:
    """Names of modules of `package` that a file imports, read without running it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return {name for name in names if name == package or name.startswith(f"{package}.")}


def source_files(builder: str) -> list[Path]:
    """The files a builder `package.module:function` is made of: modules of that package, CUDA sources beside them."""
    module = builder.partition(":")[0]
    package = module.partition(".")[0]
    waiting, found = [module, *BUILD_MODULES], dict[str, Path]()
    while waiting:
        name = waiting.pop()
        if name in found or (path := _module_path(name)) is None:
            continue
        found[name] = path
        if name not in BUILD_MODULES:
            waiting.extend(_imports(path, package))
    folders = {path.parent for name, path in found.items() if name not in BUILD_MODULES}
    beside = {path for folder in folders for path in folder.iterdir() if path.suffix in CUDA_SUFFIXES}
    return sorted({*found.values(), *beside}, key=lambda path: path.name)


def tool_versions() -> dict[str, str]:
    """Versions of what turns a builder into a cubin."""
    versions = {name: importlib.metadata.version(name) for name in ("tilelang", "apache-tvm-ffi")}
    return {**versions, "nvcc": toolchain.nvcc_version()}


def kernel_key(kernel: Any, tools: dict[str, str]) -> str:
    """Hash of everything the cubin and the launch facts of a kernel depend on."""
    files = source_files(kernel.builder)
    facts = {
        "kernel": asdict(kernel),
        "target": HOPPER.target,
        "tools": tools,
        "format": MANIFEST_FORMAT,
    }
    parts = [json.dumps(facts, sort_keys=True, default=str)]
    for path in files:
        parts += [path.name, path.read_text()]
    return _digest(parts)


# ---- one kernel


@dataclass(frozen=True)
class _Job:
    kernel: Any
    key: str
    tools: dict[str, str]
    out: Path
    keep: Path | None
    search: list[str]


def _nvcc_options(pass_configs: dict[str, Any]) -> list[str]:
    level = pass_configs.get("tl.ptxas_register_usage_level")
    extra = pass_configs.get("tl.device_compile_flags") or []
    return toolchain.nvcc_options(
        HOPPER.target["arch"],
        fast_math=bool(pass_configs.get("tl.enable_fast_math", False)),
        register_usage_level=None if level is None else int(level),
        extra=extra.split() if isinstance(extra, str) else [word for flag in extra for word in str(flag).split()],
    )


def check_log(log: str) -> None:
    """Refuses a kernel on what ptxas said of it."""
    if lines := toolchain.forbidden_messages(log):
        raise BuildError("ptxas must not serialise WGMMA or ignore register limits, got\n  " + "\n  ".join(lines))


def check_shared(static_bytes: int, dynamic_bytes: int) -> None:
    """Refuses a kernel that asks for more shared memory than a block can have."""
    if static_bytes + dynamic_bytes > HOPPER.shared_bytes:
        raise BuildError(f"shared memory must be <= {HOPPER.shared_bytes} bytes, got {static_bytes} + {dynamic_bytes}")


def check_spills(resources: toolchain.Resources, cubin: Path) -> str | None:
    """Refuses a kernel that touches local memory inside a loop; gives the disassembly where one was needed."""
    used = resources.stack_bytes or resources.spill_store_bytes or resources.spill_load_bytes
    if not used:
        return None
    nvdisasm = toolchain.find_cuda_tool("nvdisasm")
    if nvdisasm is None:
        raise BuildError(
            f"local memory must be 0 bytes where nvdisasm is not installed to look for loops, got {resources}"
        )
    text = toolchain.run([str(nvdisasm), "-c", str(cubin)])
    if found := sass.local_memory_in_loops(text):
        shown = "\n  ".join(found[:10])
        raise BuildError(f"loops must not touch local memory, got {len(found)} instructions ({resources}):\n  {shown}")
    return text


def _build_kernel(job: _Job) -> dict[str, Any]:
    sys.path[:] = job.search
    from kernels import lowering  # imports TileLang: seconds, and only where something is to be built

    kernel = job.kernel
    work = job.out / f".{kernel.name}.{os.getpid()}"
    work.mkdir(parents=True)
    try:
        lowered = lowering.lower(kernel, HOPPER.target)
        source, cubin = work / f"{kernel.name}.cu", work / f"{kernel.name}.cubin"
        source.write_text(lowered.source)
        if job.keep:
            shutil.copy(source, job.keep)
        log = toolchain.compile_cubin(source, cubin, _nvcc_options(kernel.pass_configs), lowering.include_folders())
        if job.keep:
            (job.keep / f"{kernel.name}.log").write_text(log)
            shutil.copy(cubin, job.keep)
        launch = lowered.launch
        resources = toolchain.read_ptxas_log(log, launch.symbol)
        check_log(log)
        check_shared(resources.static_shared_bytes, launch.dynamic_shared_bytes)
        if faults := offsets.wrapped_offsets(lowered.source, launch.symbol, list(launch.buffers)):
            raise BuildError("offsets must be 64-bit and not wrapped, got\n  " + "\n  ".join(faults))
        check_spills(resources, cubin)
        cubin_digest = hashlib.sha256(cubin.read_bytes()).hexdigest()
        os.replace(cubin, job.out / cubin.name)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return {
        "key": job.key,
        "cubin": f"{kernel.name}.cubin",
        "cubin_sha256": cubin_digest,
        "source_sha256": _digest([lowered.source]),
        "kernel": asdict(kernel),
        "tools": job.tools,
        "resources": asdict(resources),
        "launch": asdict(launch),
    }


# ---- the FFI library


def _ffi_include() -> tuple[Path, tuple[int, int]]:
    """The folder of jaxlib's FFI headers and the version of their interface; jaxlib itself is not imported."""
    spec = importlib.util.find_spec("jaxlib")
    if spec is None or spec.origin is None:
        raise BuildError("jaxlib must be installed, for its FFI headers")
    folder = Path(spec.origin).parent / "include"
    text = (folder / "xla" / "ffi" / "api" / "c_api.h").read_text()
    major, minor = (re.search(rf"#define XLA_FFI_API_{part} (\d+)", text) for part in ("MAJOR", "MINOR"))
    if not major or not minor:
        raise BuildError(f"{folder} must name the version of the FFI interface")
    return folder, (int(major[1]), int(minor[1]))


def build_library(out: Path, previous: dict[str, Any], *, force: bool = False) -> dict[str, Any]:
    """Compiles ffi/*.cc into the library; gives its manifest entry."""
    include, api = _ffi_include()
    files = sorted(path for path in (ROOT / "ffi").iterdir() if path.suffix in (".cc", ".h"))
    headers = sorted((include / "xla" / "ffi" / "api").glob("*.h"))
    parts = [toolchain.cxx_version(), *CXX_OPTIONS]
    for path in (*files, *headers):
        parts += [path.name, path.read_text()]
    key = _digest(parts)
    if not force and previous.get("key") == key and (out / LIBRARY).exists():
        return previous
    temporary = out / f".{LIBRARY}.{os.getpid()}"
    sources = [str(path) for path in files if path.suffix == ".cc"]
    try:
        toolchain.run(
            [toolchain.find_cxx(), *CXX_OPTIONS, "-isystem", str(include), *sources, "-ldl", "-o", str(temporary)]
        )
        os.replace(temporary, out / LIBRARY)
    finally:
        temporary.unlink(missing_ok=True)
    return {
        "key": key,
        "library": LIBRARY,
        "api": list(api),
        "jaxlib": importlib.metadata.version("jaxlib"),
        "cxx": toolchain.cxx_version(),
        "needs": toolchain.symbol_versions(out / LIBRARY),
    }


# ---- all of it


def read_manifest(out: Path) -> dict[str, Any]:
    """The manifest of an earlier build, or an empty one."""
    path = out / MANIFEST
    if path.exists():
        manifest = json.loads(path.read_text())
        if manifest.get("format") == MANIFEST_FORMAT:
            return manifest
    return {"format": MANIFEST_FORMAT, "target": HOPPER.target["arch"], "ffi": {}, "kernels": {}}


def launch_of(entry: dict[str, Any]) -> Launch:
    """The launch facts of a manifest entry."""
    facts = dict(entry["launch"])
    for field, kind in (
        ("dims", Dim),
        ("buffers", Buffer),
        ("scalars", Scalar),
        ("tensor_maps", TensorMap),
        ("params", Param),
    ):
        facts[field] = tuple(kind(**x) for x in facts[field])
    return Launch(**facts)


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text)
    os.replace(temporary, path)


def _write_outputs(out: Path, manifest: dict[str, Any]) -> None:
    kernels = manifest["kernels"] = dict(sorted(manifest["kernels"].items()))
    _write(out / TABLE, render((name, entry["cubin"], launch_of(entry)) for name, entry in kernels.items()))
    _write(out / MANIFEST, json.dumps(manifest, indent=1, sort_keys=True) + "\n")
    kept = {entry["cubin"] for entry in kernels.values()}
    for path in out.glob("*.cubin"):
        if path.name not in kept:
            path.unlink()


@contextlib.contextmanager
def _locked(out: Path) -> Iterator[None]:
    out.mkdir(parents=True, exist_ok=True)
    with (out / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def build(
    table: Sequence[Any],
    out: Path = OUT,
    *,
    jobs: int | None = None,
    only: Sequence[str] = (),
    force: bool = False,
    keep: Path | None = None,
) -> dict[str, Any]:
    """Builds what is out of date and writes the outputs; gives the names `built` and what `failed`, and why."""
    names = [kernel.name for kernel in table]
    if len(set(names)) != len(names):
        raise BuildError(f"kernel names must be unique, got {sorted(names)}")
    if unknown := sorted(set(only) - set(names)):
        raise BuildError(f"--only must name kernels of {sorted(names)}, got {unknown}")
    if keep:
        keep.mkdir(parents=True, exist_ok=True)
    with _locked(out):
        manifest = read_manifest(out)
        old = manifest["kernels"]
        tools = tool_versions() if table else {}
        chosen = [kernel for kernel in table if not only or kernel.name in only]
        # a kernel left out by --only stays as it is
        entries = {name: old[name] for name in names if name in old and (out / old[name]["cubin"]).exists()}
        work = []
        for kernel in chosen:
            key = kernel_key(kernel, tools)
            if force or kernel.name not in entries or entries[kernel.name]["key"] != key:
                entries.pop(kernel.name, None)
                work.append(_Job(kernel, key, tools, out, keep, list(sys.path)))
        failed: dict[str, str] = {}
        for name, outcome in _run(work, jobs):
            if isinstance(outcome, Exception):
                failed[name] = f"{type(outcome).__name__}: {outcome}"
            else:
                entries[name] = outcome
        manifest["kernels"] = entries
        manifest["ffi"] = build_library(out, manifest["ffi"], force=force)
        _write_outputs(out, manifest)
    built = [job.kernel.name for job in work if job.kernel.name not in failed]
    return {"built": built, "failed": failed, "manifest": manifest}


def _run(work: list[_Job], jobs: int | None) -> Iterator[tuple[str, dict[str, Any] | Exception]]:
    if not work:
        return
    workers = max(1, min(jobs or os.cpu_count() or 1, len(work)))
    # fork would copy whatever state this process has; TileLang's must not depend on it
    context = multiprocessing.get_context("spawn")
    with (
        ProcessPoolExecutor(workers, mp_context=context, max_tasks_per_child=1) as pool,
        tqdm(total=len(work), desc="kernels", unit="kernel") as bar,
    ):
        futures = {pool.submit(_build_kernel, job): job.kernel.name for job in work}
        for future in as_completed(futures):
            name = futures[future]
            bar.set_postfix_str(name)
            bar.update()
            error = future.exception()
            if error is None:
                yield name, future.result()
            else:
                yield name, error if isinstance(error, Exception) else RuntimeError(repr(error))


def _describe(manifest: dict[str, Any]) -> Iterator[str]:
    for name, entry in manifest["kernels"].items():
        used, launch = entry["resources"], entry["launch"]
        shared = used["static_shared_bytes"] + launch["dynamic_shared_bytes"]
        threads = "x".join(str(n) for n in launch["block"] if n > 1) or "1"
        spills = used["spill_store_bytes"] + used["spill_load_bytes"]
        yield f"{name}: {used['registers']} registers, {threads} threads, {shared} bytes shared, {spills} bytes spilled"


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m kernels.build", description="Build the kernels and the FFI library."
    )
    parser.add_argument("--jobs", type=int, help="kernels built at once (default: one a processor)")
    parser.add_argument(
        "--only", action="append", default=[], metavar="NAME", help="build this kernel alone; repeatable"
    )
    parser.add_argument("--out", type=Path, default=OUT, help="folder to write (default: jaxqla/lib)")
    parser.add_argument("--force", action="store_true", help="build even what is up to date")
    parser.add_argument(
        "--keep", type=Path, metavar="FOLDER", help="also keep CUDA sources, cubins and compiler logs here"
    )
    parser.add_argument("--table", default="kernels.table:KERNELS", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    module, _, name = options.table.partition(":")
    table = getattr(importlib.import_module(module), name)
    outcome = build(
        table, options.out.resolve(), jobs=options.jobs, only=options.only, force=options.force, keep=options.keep
    )
    for line in _describe(outcome["manifest"]):
        print(line)
    for name, message in outcome["failed"].items():
        print(f"FAILED {name}: {message}", file=sys.stderr)
    print(
        f"built {len(outcome['built'])}, failed {len(outcome['failed'])}, kernels {len(outcome['manifest']['kernels'])}"
    )
    return 1 if outcome["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
