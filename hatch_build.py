"""Build hook: a wheel holds what `make kernels` built, and says which machines it is for."""

import json
import os
from pathlib import Path

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

LIB = Path("jaxqla", "lib")
# The only platform there are kernels for, and what its oldest systems (RHEL 9, Ubuntu 22.04) have.
TAG = "py3-none-manylinux_2_34_x86_64"
NEWEST = {"GLIBC": "2.34", "GLIBCXX": "3.4.29", "CXXABI": "1.3.13", "GCC": "12.0.0"}
# The FFI interface of the oldest jaxlib supported: a handler built against a newer one is refused by older ones.
FFI_API = [0, 3]


def _parts(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


class CustomBuildHook(BuildHookInterface):
    """Adds the built files to wheels; editable installs and source distributions need none."""

    def initialize(self, version: str, build_data: dict) -> None:
        """Adds files and tag, or raises where the built files are missing or not fit for a wheel."""
        if self.target_name != "wheel" or version == "editable":
            return
        root = Path(self.root)
        manifest_path = root / LIB / "manifest.json"
        if not manifest_path.exists():
            if os.environ.get("JAXQLA_WHEEL_WITHOUT_KERNELS") == "1":
                return
            raise RuntimeError(
                f"wheel: {LIB / 'manifest.json'} must exist; run make kernels first, or set"
                " JAXQLA_WHEEL_WITHOUT_KERNELS=1 for a wheel of the plain JAX path alone"
            )
        manifest = json.loads(manifest_path.read_text())
        if manifest["ffi"]["api"] != FFI_API:
            raise RuntimeError(f"wheel: the library must be built for FFI API {FFI_API}, got {manifest['ffi']['api']}")
        needs = manifest["ffi"]["needs"]
        if newer := {name: x for name, x in needs.items() if _parts(x) > _parts(NEWEST[name])}:
            raise RuntimeError(f"wheel: the library must need nothing newer than {NEWEST} for {TAG}, got {newer}")
        names = [manifest["ffi"]["library"], "launch_table.txt", "manifest.json"]
        names += [kernel["cubin"] for kernel in manifest["kernels"].values()]
        build_data["pure_python"] = False
        build_data["tag"] = TAG
        build_data["force_include"].update({str(root / LIB / name): str(LIB / name) for name in sorted(names)})
