"""Looks for offsets into global memory that cannot hold what they should: wrapped constants, products in 32 bits."""

import re
from collections.abc import Iterator

from kernels.launch_table import Buffer

INT32_LIMIT = 2**31
# Below it a negative constant is a small step backwards; a wrapped one is a stride or more.
SMALLEST_WRAPPED = 2**16

_LITERAL = re.compile(r"(?<![\w.])(\d+)(?![\w.])")
# a minus sign after an operator, an opening bracket or a cast belongs to the literal
_NEGATIVE = re.compile(r"(?:[-+*/%(\[,]|\(int(?:64_t)?\))\s*-\s*(\d+)\b")
_NAME = re.compile(r"\b(?!int64_t\b|int\b|threadIdx\b|blockIdx\b|x\b|y\b|z\b)[A-Za-z_]\w*|\b(?:threadIdx|blockIdx)\b")
_CLOSING = {"(": ")", "[": "]"}


def _balanced(text: str, start: int, closing: str) -> str:
    """Text from `start` up to the bracket that closes the one before it."""
    expected = [closing]
    for i in range(start, len(text)):
        if text[i] in _CLOSING:
            expected.append(_CLOSING[text[i]])
        elif text[i] in ")]":
            if text[i] != expected.pop():
                break
            if not expected:
                return text[start:i]
    raise ValueError(f"wrapped_offsets: brackets must match, got {text[start : start + 80]!r}")


def _offsets(body: str, name: str) -> Iterator[str]:
    for found in re.finditer(rf"(?<![\w.]){name}\s*\[", body):
        yield _balanced(body, found.end(), "]")
    for found in re.finditer(rf"\(\s*{name}\s*\+\s*", body):
        yield _balanced(body, found.end(), ")")


def _fits_32_bits(buffer: Buffer) -> bool:
    # An axis is below 2^31 (the launcher checks it), so one axis needs no more; several do unless all are constant and
    # small.
    if len(buffer.shape) == 1:
        return True
    size = 1
    for extent in buffer.shape:
        if not extent.isdigit():
            return False
        size *= int(extent)
    return size < INT32_LIMIT


def wrapped_offsets(source: str, symbol: str, buffers: list[Buffer]) -> list[str]:
    """Offsets in the CUDA text of `symbol` that are wrapped or may wrap, each with its reason."""
    found = list(re.finditer(rf"__global__[^;{{]*\b{symbol}\s*\([^{{;]*\{{", source))
    if not found:
        raise ValueError(f"wrapped_offsets: the source must define {symbol}")
    body = source[found[-1].end() :]
    faults = []
    for buffer in buffers:
        for offset in dict.fromkeys(_offsets(body, re.escape(buffer.name))):
            if any(int(x) >= SMALLEST_WRAPPED for x in _NEGATIVE.findall(f"({offset}")):
                faults.append(f"{buffer.name}: negative constant in {offset}")
            elif any(int(x) >= INT32_LIMIT for x in _LITERAL.findall(offset)):
                faults.append(f"{buffer.name}: constant above 2^31 in {offset}")
            elif "int64_t" not in offset and _NAME.search(offset) and not _fits_32_bits(buffer):
                faults.append(f"{buffer.name}: 32-bit offset {offset}")
    return faults
