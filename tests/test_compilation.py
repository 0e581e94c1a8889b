"""Compilation of the op: abstract evaluation, 64-bit mode, ahead of time, and the persistent cache."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np

import jaxqla
from kernels.build import ROOT
from tests import cases

# Gradients on one device, and on eight that the call names.
CALL = """
import jax
import jaxqla
from tests import cases

x = cases.make(B=2, T=9, H=4, HV=8, K=8, V=6, dtype="float32")
mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
for split in ({}, {"mesh": mesh, "batch_axis": "data", "head_axis": "tensor"}):

    def loss(*arrays):
        return jaxqla.gated_delta(*arrays, **split)[0].sum()

    jax.block_until_ready(jax.jit(jax.grad(loss, argnums=range(5)))(*x[:5]))
"""


def test_abstract_evaluation():
    inputs = cases.make(B=2, T=70, H=1, HV=2, K=8, V=6, initial_state=True)
    o, state = jax.eval_shape(
        lambda *x: jaxqla.gated_delta(*x[:5], initial_state=x[5], return_final_state=True), *inputs[:6]
    )
    assert (o.shape, o.dtype) == ((2, 70, 2, 6), jnp.bfloat16)
    assert (state.shape, state.dtype) == ((2, 2, 8, 6), jnp.float32)


def test_64_bit_mode_changes_nothing():
    inputs = cases.make(B=2, T=5, H=1, HV=2, K=8, V=6, dtype="float32", initial_state=True)

    def call(*x):
        return jaxqla.gated_delta(*x[:5], initial_state=x[5], return_final_state=True, scale=0.3)

    narrow = jax.jit(call)(*inputs[:6])
    with jax.enable_x64(True):
        wide = jax.jit(call)(*inputs[:6])
    for a, b in zip(narrow, wide, strict=True):
        assert a.dtype == b.dtype == jnp.float32
        np.testing.assert_array_equal(a, b)


def test_ahead_of_time():
    inputs = cases.make(B=1, T=5, H=1, HV=2, K=8, V=8, dtype="float32")
    call = jax.jit(lambda *x: jaxqla.gated_delta(*x)[0])
    compiled = call.lower(*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs[:5])).compile()
    np.testing.assert_array_equal(compiled(*inputs[:5]), call(*inputs[:5]))


def test_the_persistent_cache_hits(tmp_path):
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    entries = []
    for _ in range(2):
        subprocess.run([sys.executable, "-c", CALL], cwd=ROOT, env=environment, check=True)
        entries.append({path.name for path in tmp_path.iterdir() if path.name.endswith("-cache")})
    assert sum(name.startswith("jit_loss-") for name in entries[0]) == 2
    assert entries[0] == entries[1]
