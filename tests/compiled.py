"""What compiled programs hold, for the tests of several devices and of donation."""

import re
from typing import Any

import jax

COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")


def collectives(function: Any, *arrays: Any) -> dict[str, int]:
    """How many collectives of each kind a jitted function has; those that are there."""
    return collectives_of(function.lower(*arrays).compile())


def collectives_of(compiled: Any) -> dict[str, int]:
    """The same of what is compiled already."""
    text = compiled.as_text()
    return {name: n for name in COLLECTIVES if (n := len(re.findall(rf"\b{name}(?:-start)?\(", text)))}


def compile_quickly(lowered: Any) -> Any:
    """Compiles what a jitted function was lowered to in less time; what is left out decides nothing about devices."""
    options: dict[str, Any] = {"xla_backend_optimization_level": 0}
    if jax.__version_info__ < (0, 11):
        options["xla_cpu_use_fusion_emitters"] = False
    return lowered.compile(options)
