"""Does importing jaxqla stay cheap, touch no device, and bring in nothing that belongs to the build?"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import jaxqla

PACKAGE = Path(jaxqla.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))

# Of no use at run time, or of the build alone.
UNWANTED = ("kernels", "tilelang", "torch", "tvm", "tvm_ffi", "flax", "pytest")


def run(program, **environment):
    """Runs a Python program in a process of its own and returns what it printed as JSON."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        env=os.environ | {"PYTHONPATH": str(PACKAGE.parent), "JAX_PLATFORMS": "cpu"} | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


IMPORT = """
import json, sys, time
import jax, jax.numpy
before = time.perf_counter()
import jaxqla
seconds = time.perf_counter() - before
"""


def test_import_is_fast_and_loads_no_library_of_cuda():
    # A platform that does not exist: whatever initialised a backend would raise.
    report = """
maps = open("/proc/self/maps").read()
print(json.dumps([seconds, sorted(name for name in ("libcuda.so", "libcudart") if name in maps)]))
"""
    seconds, libraries = run(IMPORT + report, JAX_PLATFORMS="no_such_platform")
    assert seconds < 1
    assert libraries == []


def test_a_call_brings_in_nothing_of_the_build():
    call = f"""
import importlib, pkgutil
for module in pkgutil.iter_modules(jaxqla.__path__, "jaxqla."):
    if module.name not in ("jaxqla.flax", "jaxqla.models"):
        importlib.import_module(module.name)
x = jax.numpy.ones((1, 3, 1, 2))
jaxqla.gated_delta(x, x, x, -x[..., 0], x[..., 0])
print(json.dumps(sorted(set({UNWANTED!r}) & set(sys.modules))))
"""
    assert run(IMPORT + call) == []


@pytest.mark.parametrize("pattern", [r"jax\._src", r"default_backend", r"\bimport torch", r"\bimport tilelang"])
def test_sources_use_public_jax_alone(pattern):
    assert [path.name for path in SOURCES if re.search(pattern, path.read_text())] == []


def test_public_names():
    assert jaxqla.__all__ == [
        "FINAL_STATE_NAME",
        "OUTPUT_NAME",
        "__version__",
        "causal_conv1d",
        "causal_conv1d_step",
        "explain",
        "export_checks",
        "gated_delta",
        "gated_delta_step",
        "gdn_gates",
        "save_residuals",
    ]
    assert all(getattr(jaxqla, name).__doc__ for name in jaxqla.__all__)
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+)?", jaxqla.__version__)


def test_the_report_of_the_environment():
    done = subprocess.run(
        [sys.executable, "-m", "jaxqla"],
        env=os.environ | {"PYTHONPATH": str(PACKAGE.parent), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith(f"jaxqla {jaxqla.__version__}\n")
    for part in ("  jax ", "devices\n", "kernels\n", "support\n", "| float32 | any | plain JAX | plain JAX |"):
        assert part in done.stdout
