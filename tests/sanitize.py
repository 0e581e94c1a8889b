"""Small calls that reach every branch of the kernels, for compute-sanitizer:

compute-sanitizer --tool memcheck python tests/sanitize.py
compute-sanitizer --tool racecheck python tests/sanitize.py
"""

import os
import sys
from pathlib import Path

# An allocation for each buffer: in a pool, what lies behind a buffer is another one, and the tool sees nothing wrong.
os.environ.setdefault("XLA_PYTHON_CLIENT_ALLOCATOR", "platform")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
import numpy as np

from tests import cases
from tests.test_cuda import segments, with_tile
from tests.test_cuda_gradients import by_kernels, cotangents, gradients


def main() -> None:
    """Runs them; the tool reports."""
    calls = [
        cases.make(B=1, T=130, H=1, HV=2, cu_seqlens=[0, 0, 65, 65, 129], initial_state=True).poisoned(),
        cases.make(B=3, T=330, H=1, HV=1, segment_ids=segments(), initial_state=True).poisoned(),
        cases.make(B=1, T=200, H=1, HV=5),
        cases.make(B=1, T=200, H=1, HV=1, dtype="float16"),
    ]
    for inputs in calls:
        for v_tile in (64, 128):
            o, state = jax.block_until_ready(with_tile(*inputs, v_tile=v_tile))
            assert np.isfinite(np.asarray(o, np.float32)).all()
            assert np.isfinite(np.asarray(state)).all()
        for of_state in (True, False):
            found = gradients(by_kernels, inputs, *cotangents(inputs, of_state))
            for gradient in jax.block_until_ready(found).values():
                assert np.isfinite(np.asarray(gradient, np.float32)).all()
    print("done")


if __name__ == "__main__":
    main()
