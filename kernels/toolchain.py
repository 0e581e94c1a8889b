"""The compilers: where nvcc and g++ are, how they are called, and what ptxas says."""

import functools
import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


class ToolError(Exception):
    """A tool is missing, or refused its input."""


@dataclass(frozen=True)
class Resources:
    """What ptxas reports of one kernel."""

    registers: int
    barriers: int
    static_shared_bytes: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int


def _toolkits() -> Iterator[Path]:
    """Roots of CUDA toolkits: the one installed from PyPI beside us, CUDA_HOME, the search path, the usual place."""
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations or () if spec else ():
        yield from sorted(Path(folder).glob("cu*"), reverse=True)
    if home := os.environ.get("CUDA_HOME"):
        yield Path(home)
    if found := shutil.which("nvcc"):
        yield Path(found).resolve().parent.parent
    yield Path("/usr/local/cuda")


def find_cuda_tool(name: str) -> Path | None:
    """Path of nvcc, nvdisasm, ... or None."""
    candidates = (root / "bin" / name for root in _toolkits())
    found = next((path for path in candidates if os.access(path, os.X_OK) and path.is_file()), None)
    return found or (Path(path) if (path := shutil.which(name)) else None)


def find_nvcc() -> Path:
    """Path of nvcc."""
    if found := find_cuda_tool("nvcc"):
        return found
    raise ToolError("kernels.build: nvcc must be installed, got none; `pip install 'jaxqla[build]'` brings one")


def find_cxx() -> str:
    """The C++ compiler, $CXX or g++."""
    command = os.environ.get("CXX", "g++")
    if found := shutil.which(command):
        return found
    raise ToolError(f"kernels.build: a C++ compiler must be installed, got none called {command}")


def run(command: list[str]) -> str:
    """Runs a tool and gives what it printed; a failure raises with all of that."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        raise ToolError(f"{' '.join(command)}\nexit status {done.returncode}\n{done.stdout}")
    return done.stdout


@functools.cache
def nvcc_version() -> str:
    """Version of nvcc, such as 13.0.88."""
    text = run([str(find_nvcc()), "--version"])
    return _match(r"V(\d+\.\d+\.\d+)", text)


@functools.cache
def cxx_version() -> str:
    """First line of what the C++ compiler says of itself."""
    return run([find_cxx(), "--version"]).splitlines()[0]


def symbol_versions(library: Path) -> dict[str, str]:
    """The newest version of each set of symbols (GLIBC, GLIBCXX, ...) that a library needs of the system."""
    newest: dict[str, tuple[int, ...]] = {}
    for name, version in re.findall(r"\((GLIBC|GLIBCXX|CXXABI|GCC)_([\d.]+)\)", run(["objdump", "-T", str(library)])):
        parts = tuple(map(int, version.split(".")))
        newest[name] = max(newest.get(name, ()), parts)
    return {name: ".".join(map(str, parts)) for name, parts in sorted(newest.items())}


def _match(pattern: str, text: str) -> str:
    if found := re.search(pattern, text):
        return found[1]
    raise ToolError(f"kernels.build: tool output must match {pattern!r}, got {text!r}")


def nvcc_options(arch: str, *, fast_math: bool, register_usage_level: int | None, extra: list[str]) -> list[str]:
    """Options that turn CUDA source into SASS for `arch` (sm_90a) and no PTX, as TileLang itself gives them."""
    options = [
        "-std=c++20",
        "-Xcudafe",
        "--diag_suppress=177",
        "-lineinfo",
        "-gencode",
        f"arch={arch.replace('sm_', 'compute_')},code={arch}",
        "-cubin",
        "-Xptxas",
        "-v",
    ]
    if fast_math:
        options.append("--use_fast_math")
    if register_usage_level is not None:
        options.append(f"--ptxas-options=--register-usage-level={register_usage_level}")
    return options + extra


def compile_cubin(source: Path, cubin: Path, options: list[str], include: list[str]) -> str:
    """Compiles CUDA source to a cubin; gives the log of ptxas."""
    nvcc = find_nvcc()
    folders = [f"-I{folder}" for folder in include]
    # a toolkit from PyPI keeps its headers beside its programs, where nvcc.profile finds them
    return run([str(nvcc), *options, *folders, str(source), "-o", str(cubin)])


def read_ptxas_log(log: str, symbol: str) -> Resources:
    """Reads registers, shared memory and spills of `symbol` from the log of `ptxas -v`."""
    _, found, text = log.partition(f"Function properties for {symbol}\n")
    if not found:
        raise ToolError(f"kernels.build: the log of ptxas must speak of {symbol}, got {log!r}")
    text = text.partition("Function properties for")[0]

    def number(pattern: str) -> int:
        match = re.search(pattern, text)
        return int(match[1]) if match else 0

    return Resources(
        registers=int(_match(r"Used (\d+) registers", text)),
        barriers=number(r"used (\d+) barriers"),
        static_shared_bytes=number(r"(\d+) bytes smem"),
        stack_bytes=number(r"(\d+) bytes stack frame"),
        spill_store_bytes=number(r"(\d+) bytes spill stores"),
        spill_load_bytes=number(r"(\d+) bytes spill loads"),
    )


# C7510 to C7515: WGMMA serialised, for want of registers, for a use of its accumulators in flight, ...
_FORBIDDEN = re.compile(r"C751[0-5]\b")
# C7506, C7508, ...: setmaxnreg ignored
_IGNORED = re.compile(r"setmaxnreg ignored", re.IGNORECASE)


def forbidden_messages(log: str) -> list[str]:
    """Lines of the log of ptxas with which a kernel may not be built."""
    return [line.strip() for line in log.splitlines() if _FORBIDDEN.search(line) or _IGNORED.search(line)]
