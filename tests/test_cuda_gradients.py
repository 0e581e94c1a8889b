"""Gradients by the kernels on a GPU, against those of the float64 oracle on the same rounded inputs."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxqla
from jaxqla import reference
from tests import cases, tolerance

pytestmark = pytest.mark.gpu

STATE = "initial_state"


@functools.partial(jax.jit, static_argnames=("function", "names", "options"))
def _gradients(function, names, floats, ids, do, dstate, options=()):
    """Gradients of the named arguments; `do`, `dstate`: cotangents of both results, of which one may be None."""

    def results(*values):
        arrays = dict(zip(names, values, strict=True)) | ids
        q, k, v, g, beta = (arrays.pop(name) for name in ("q", "k", "v", "g", "beta"))
        outcome = function(q, k, v, g, beta, return_final_state=dstate is not None, **arrays, **dict(options))
        return outcome if dstate is not None else outcome[0]

    _, vjp = jax.vjp(results, *floats)
    return vjp((do, dstate) if dstate is not None else do)


def gradients(function, inputs: cases.Inputs, do, dstate, **options: Any) -> dict[str, Any]:
    names = tuple(inputs.floats)
    ids = {
        name: x for name, x in (("segment_ids", inputs.segment_ids), ("cu_seqlens", inputs.cu_seqlens)) if x is not None
    }
    found = _gradients(
        function, names, tuple(inputs.floats.values()), ids, do, dstate, options=tuple(sorted(options.items()))
    )
    return dict(zip(names, found, strict=True))


def cotangents(inputs: cases.Inputs, of_state: bool, seed: int = 7):
    rng = np.random.default_rng(seed)
    B, _, HV, V = inputs.v.shape
    N = B if inputs.cu_seqlens is None else len(inputs.cu_seqlens) - 1
    do = jnp.asarray(rng.standard_normal(inputs.v.shape), inputs.v.dtype)
    state = (N, HV, inputs.q.shape[-1], V)
    return do, jnp.asarray(rng.standard_normal(state), jnp.float32) if of_state else None


def by_kernels(*arrays, **options):
    return jaxqla.gated_delta(*arrays, implementation="cuda", **options)


def by_oracle(*arrays, **options):
    return reference.gated_delta(*arrays, dtype=jnp.float64, **options)


def check(inputs: cases.Inputs, of_state: bool = True, **options: Any) -> None:
    """Every gradient within the limits of tests/tolerance.py, and exactly 0 at padding."""
    do, dstate = cotangents(inputs, of_state)
    found = gradients(by_kernels, inputs, do, dstate, **options)
    with jax.enable_x64(True):
        clean = inputs if not inputs.padding.any() else inputs.poisoned(0)
        expected = gradients(by_oracle, clean, do, dstate, **options)
    for name, gradient in found.items():
        assert gradient.dtype == getattr(inputs, name).dtype
        tolerance.check(gradient, expected[name], inputs.q.dtype, f"d{name}")
        if name != STATE:
            assert not np.asarray(gradient, np.float32)[inputs.padding].any()


@pytest.mark.parametrize("T", [1, 63, 64, 65, 1000, 4097, 32768])
def test_numbers_of_tokens(T):
    check(cases.make(B=1, T=T, H=2, HV=4, initial_state=True))


@pytest.mark.parametrize("initial_state", [True, False])
@pytest.mark.parametrize("of_state", [True, False])
def test_states_in_and_out(initial_state, of_state):
    check(cases.make(B=2, T=200, H=2, HV=4, initial_state=initial_state), of_state)


@pytest.mark.parametrize(("H", "HV"), [(1, 1), (2, 8), (4, 4), (16, 48), (16, 64), (1, 9)])
def test_heads(H, HV):
    check(cases.make(B=1, T=333, H=H, HV=HV, initial_state=True))


@pytest.mark.parametrize("T", [1, 130, 1000])
def test_float16(T):
    check(cases.make(B=1, T=T, H=2, HV=4, dtype="float16", initial_state=True))


@pytest.mark.parametrize("gate", [0.0, -1e-4, -3.0, -60.0])
def test_gates(gate):
    check(cases.make(B=1, T=300, H=2, HV=4, gates=gate, initial_state=True))


@pytest.mark.parametrize("rate", [1.0, 4.0, 16.0])
def test_rates_of_decay(rate):
    noise = np.random.default_rng(3).standard_normal((1, 300, 4))
    check(cases.make(B=1, T=300, H=2, HV=4, gates=-rate * np.log1p(np.exp(noise)), initial_state=True))


@pytest.mark.parametrize("beta", [0.0, 1.0, 2.0])
def test_extreme_steps(beta):
    check(cases.make(B=1, T=300, H=2, HV=4, beta=beta, initial_state=True))


def test_identical_keys():
    inputs = cases.make(B=1, T=300, H=2, HV=4, beta=1.0, initial_state=True)
    check(inputs._replace(k=jnp.broadcast_to(inputs.k[:, :1], inputs.k.shape)))


def test_qk_l2norm():
    check(cases.make(B=1, T=300, H=2, HV=4, normalised=False), qk_l2norm=True)


def test_scale():
    check(cases.make(B=1, T=100, H=2, HV=4, initial_state=True), scale=-0.7)


@pytest.mark.parametrize("boundaries", [(0, 0, 1, 64, 64, 200, 333), (0, 100, 256), (0, 5)])
def test_cu_seqlens(boundaries):
    inputs = cases.make(B=1, T=333, H=2, HV=4, cu_seqlens=boundaries, initial_state=True)
    check(inputs.poisoned())


def segments() -> np.ndarray:
    ids = np.repeat([0, 1, 2, 0, 3, 4], [3, 60, 70, 9, 100, 58])
    return np.stack([ids, np.roll(ids, 17)])


@pytest.mark.parametrize("qk_l2norm", [True, False])
def test_segment_ids(qk_l2norm):
    check(cases.make(B=2, T=300, H=2, HV=4, segment_ids=segments(), initial_state=True).poisoned(), qk_l2norm=qk_l2norm)


def test_fifty_repeats_are_equal_to_the_bit():
    inputs = cases.make(B=2, T=1000, H=4, HV=8, initial_state=True)
    do, dstate = cotangents(inputs, True)
    first = {name: np.asarray(x).tobytes() for name, x in gradients(by_kernels, inputs, do, dstate).items()}
    for _ in range(50):
        again = gradients(by_kernels, inputs, do, dstate)
        assert {name: np.asarray(x).tobytes() for name, x in again.items()} == first


def test_no_plain_jax_in_a_gradient():
    inputs = cases.make(B=1, T=256, H=2, HV=4)
    do, _ = cotangents(inputs, False)
    names = tuple(inputs.floats)
    text = _gradients.lower(by_kernels, names, tuple(inputs.floats.values()), {}, do, None).compile().as_text()
    for kernel in ("coupling", "backward_states", "backward_gradients"):
        assert f"gdn_{'chunk_' if kernel == 'coupling' else ''}{kernel}" in text
    assert "while" not in text


def test_memory_is_what_the_design_says():
    B, T, H, HV = 2, 4096, 2, 8
    inputs = cases.make(B=B, T=T, H=H, HV=HV)
    do, _ = cotangents(inputs, False)
    names = tuple(inputs.floats)
    lowered = _gradients.lower(by_kernels, names, tuple(inputs.floats.values()), {}, do, None)
    chunks = B * T // 64 + B
    formula = 2 * chunks * HV * (64**2 + 2 * 128**2 + 2 * 64 * 128) + 4 * 64 * chunks * HV
    assert lowered.compile().memory_analysis().temp_size_in_bytes <= 1.02 * formula


def test_in_checkpoint_scan_and_vmap():
    inputs = cases.make(B=2, T=200, H=2, HV=4)
    q, k, v, g, beta = inputs[:5]

    def loss(implementation, q, k, v, g, beta):
        @jax.checkpoint
        def layer(x, _):
            one = functools.partial(jaxqla.gated_delta, implementation=implementation)
            # One row at a time, by vmap.
            o = jax.vmap(lambda *row: one(*(y[None] for y in row))[0][0])(q, k, x, g, beta)
            return o, None

        x, _ = jax.lax.scan(layer, v, length=3)
        return jnp.sum(x.astype(jnp.float32) ** 2)

    def of(implementation, *arrays):
        return jax.jit(jax.grad(functools.partial(loss, implementation), argnums=range(5)))(*arrays)

    found = of("cuda", q, k, v, g, beta)
    wide = (x.astype(jnp.float32) for x in (q, k, v))
    for name, gradient, expected in zip(("q", "k", "v", "g", "beta"), found, of("xla", *wide, g, beta), strict=True):
        tolerance.check(gradient, expected, q.dtype, f"d{name}", roundings=24)


def test_vmap_of_grad():
    inputs = cases.make(B=3, T=100, H=2, HV=4)
    do, _ = cotangents(inputs, False)

    def one(q, k, v, g, beta, do):
        return jax.vjp(lambda *x: by_kernels(*(y[None] for y in x))[0][0], q, k, v, g, beta)[1](do)

    batched = jax.jit(jax.vmap(one))(*inputs[:5], do)
    for row in range(3):
        for x, y in zip(batched, jax.jit(one)(*(z[row] for z in inputs[:5]), do[row]), strict=True):
            np.testing.assert_array_equal(x[row], y)
