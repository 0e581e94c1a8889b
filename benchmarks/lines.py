"""The lines of a run: where they are kept, and which sources they are of."""

import hashlib
import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).with_name("results")


def source_hash() -> str:
    """Hash of what decides our own times: the package, and the kernels as they were built."""
    state = hashlib.sha256()
    package = ROOT / "jaxqla"
    for path in sorted([*package.glob("*.py"), package / "lib" / "launch_table.txt", *package.glob("lib/*.cubin")]):
        if path.exists():
            state.update(path.name.encode() + path.read_bytes())
    return state.hexdigest()[:16]


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a result file, none where there is no file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
