"""The wheel: what is in it, for which machines, and what it refuses. Needs `make kernels`.

`make check-wheel` installs one; every other environment of the Makefile is an editable install with nothing built.
"""

import json
import runpy
import shutil
import subprocess
import sys
import zipfile

import pytest

from jaxqla import _launch
from kernels import build as build_module
from kernels.build import ROOT

# The build backend is where kernels are built; users' environments have none.
pytest.importorskip("hatchling")

COPIED = ("jaxqla", "hatch_build.py", "pyproject.toml", "README.md", "LICENSE")


@pytest.fixture
def project(tmp_path):
    """A copy to change."""
    folder = tmp_path / "project"
    folder.mkdir()
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__", ".lock"))
        else:
            shutil.copy(source, folder)
    return folder


def build(project, **environment):
    """Calls the build backend; gives the names in the wheel, or the error."""
    out = project / "dist"
    out.mkdir(exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-c", f"import hatchling.build as b; print(b.build_wheel({str(out)!r}))"],
        cwd=project,
        env=environment or None,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        return None, done.stderr
    name = done.stdout.splitlines()[-1]
    return name, zipfile.ZipFile(out / name).namelist()


def test_the_parts_agree_on_the_interface_and_the_manifest():
    hook = runpy.run_path(str(ROOT / "hatch_build.py"))
    assert tuple(hook["FFI_API"]) == build_module.WHEEL_FFI_API
    assert _launch.MANIFEST_FORMAT == build_module.MANIFEST_FORMAT
    assert _launch.LIB == build_module.OUT


def test_what_is_in_it(project):
    name, files = build(project)
    assert name.endswith("-py3-none-manylinux_2_34_x86_64.whl"), files
    manifest = json.loads((project / "jaxqla" / "lib" / "manifest.json").read_text())
    wanted = {"libjaxqla_ffi.so", "launch_table.txt", "manifest.json"}
    wanted |= {kernel["cubin"] for kernel in manifest["kernels"].values()}
    assert {file.removeprefix("jaxqla/lib/") for file in files if file.startswith("jaxqla/lib/")} == wanted
    folders = {file.split("/")[0] for file in files}
    assert len(folders) == 2, folders
    assert "jaxqla" in folders
    assert "jaxqla/ops.py" in files
    assert len(files) == len(set(files))


def test_without_kernels_it_is_refused_unless_asked_for(project):
    shutil.rmtree(project / "jaxqla" / "lib")
    name, error = build(project)
    assert name is None
    assert "run make kernels first" in error
    name, files = build(project, JAXQLA_WHEEL_WITHOUT_KERNELS="1")
    assert name.endswith("-py3-none-any.whl")
    assert not [file for file in files if file.startswith("jaxqla/lib/")]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"api": [0, 4]}, r"FFI API [0, 3], got [0, 4]"),
        ({"needs": {"GLIBC": "2.38"}}, "got {'GLIBC': '2.38'}"),
    ],
)
def test_a_library_for_newer_systems_is_refused(project, change, message):
    path = project / "jaxqla" / "lib" / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["ffi"] |= change
    path.write_text(json.dumps(manifest))
    name, error = build(project)
    assert name is None
    assert message in error
