"""What compiled programs hold, for the tests of several devices and of donation."""

import re
from typing import Any

COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")


def collectives(function: Any, *arrays: Any) -> dict[str, int]:
    """How many collectives of each kind a jitted function has; those that are there."""
    return collectives_of(function.lower(*arrays).compile())


def collectives_of(compiled: Any) -> dict[str, int]:
    """The same of what is compiled already."""
    text = compiled.as_text()
    return {name: n for name in COLLECTIVES if (n := len(re.findall(rf"\b{name}(?:-start)?\(", text)))}
