"""Pieces shared by the kernels: dimension names, the CUDA source of tiles.cuh, and the bounds of a sequence."""

from pathlib import Path

import tilelang.language as T

CHUNK = 64
LOG2_E = 1.4426950408889634
# exp2 of it is 0 in float32, and sums of 64 of them keep 2^-10: a decay to nothing that later tokens survive.
MIN_LOG2_GATE = -160.0

PAD, TOKEN, RESET = 0, 1, 2  # row flags

CUDA_SOURCE = Path(__file__).with_name("tiles.cuh").read_text()


def dims(*names: str):
    """Dimensions bound when the kernel is launched, one symbol a name."""
    return tuple(T.dynamic(name) for name in names)
