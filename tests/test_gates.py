"""Are the gates those of the layer, in float32, finite everywhere, with the gradients of their closed forms?"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxqla
from tests.compiled import collectives

NAMES = ("a", "b", "A_log", "dt_bias")


def arguments(dtype="float32", shape=(2, 5, 3), seed=0):
    rng = np.random.default_rng(seed)
    a, b = (3 * rng.standard_normal(shape) for _ in range(2))
    A_log, dt_bias = rng.uniform(-3, 3, (2, shape[-1]))
    return {name: jnp.asarray(x, dtype) for name, x in zip(NAMES, (a, b, A_log, dt_bias), strict=True)}


def closed_form(a, b, A_log, dt_bias, dg=0.0, dbeta=0.0, most=1):
    """The gates, and the gradients of a, b, A_log and dt_bias, in float64; step sizes up to `most`."""
    a, b, A_log, dt_bias = (np.asarray(x, np.float64) for x in (a, b, A_log, dt_bias))
    x = a + dt_bias
    g = -np.exp(A_log) * np.logaddexp(0, x)
    beta = most * np.exp(-np.logaddexp(0, -b))
    da = dg * -np.exp(A_log - np.logaddexp(0, -x))
    heads = tuple(range(a.ndim - 1))
    gradients = (da, dbeta * beta * (1 - beta / most), np.sum(dg * g, heads), np.sum(da, heads))
    return (g, beta), dict(zip(NAMES, gradients, strict=True))


def gradients_of(inputs, dg, dbeta, **options):
    def loss(inputs):
        g, beta = jaxqla.gdn_gates(**inputs, **options)
        return jnp.sum(dg * g) + jnp.sum(dbeta * beta)

    return jax.jit(jax.grad(loss))(inputs)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("allow_neg_eigval", [False, True])
def test_values_and_gradients_are_the_closed_forms(dtype, allow_neg_eigval):
    inputs = arguments(dtype)
    dg, dbeta = np.random.default_rng(1).standard_normal((2, *inputs["a"].shape)).astype(np.float32)
    want, want_gradients = closed_form(**inputs, dg=dg, dbeta=dbeta, most=1 + allow_neg_eigval)
    got = jaxqla.gdn_gates(**inputs, allow_neg_eigval=allow_neg_eigval)
    for x, y in zip(got, want, strict=True):
        assert x.dtype == jnp.float32
        np.testing.assert_allclose(x, y, rtol=2e-6)
    gradients = gradients_of(inputs, dg, dbeta, allow_neg_eigval=allow_neg_eigval)
    # A sum of ten terms, rounded to the dtype at the end.
    eps = float(jnp.finfo(dtype).eps)
    for name, x in gradients.items():
        assert x.dtype == dtype
        np.testing.assert_allclose(
            np.asarray(x, np.float64), want_gradients[name], rtol=2 * eps, atol=20 * eps, err_msg=name
        )


def test_no_gate_is_rounded_to_the_dtype_of_the_projections():
    half = jnp.full((1, 1), 0.5, jnp.bfloat16)
    zero = jnp.zeros(1, jnp.bfloat16)
    g, beta = jaxqla.gdn_gates(half, half, zero, zero)
    # bfloat16 has 0.62109375 and -0.97265625 there.
    np.testing.assert_allclose([beta[0, 0], g[0, 0]], [0.6224593312, -0.9740769842], rtol=1e-6)


def test_each_head_has_its_own_rate_and_bias():
    shape = (2, 4, 7)
    A_log, dt_bias = jnp.log(jnp.arange(1.0, 8)), jnp.arange(7.0)
    g, beta = jaxqla.gdn_gates(jnp.zeros(shape), jnp.zeros(shape), A_log, dt_bias)
    for head in range(7):
        np.testing.assert_allclose(g[..., head], -(head + 1) * np.log1p(np.exp(head)), rtol=1e-6)
    np.testing.assert_array_equal(beta, np.full(shape, 0.5))


def test_everything_is_finite():
    most = float(jnp.finfo(jnp.float32).max)
    A_log, x = (-200, -20, 5, 88, 100, -most, most), (-200, -40, 0, 40, 200, -most, most)
    a, A_log, dt_bias = (jnp.asarray(y.reshape(-1), jnp.float32) for y in np.meshgrid(x, A_log, x))
    inputs = {"a": a[None], "b": a[None], "A_log": A_log, "dt_bias": dt_bias}
    g, beta = jaxqla.gdn_gates(**inputs)
    assert np.isfinite(g).all()
    assert np.isfinite(beta).all()
    assert (g <= 0).all()
    assert all(np.isfinite(x).all() for x in gradients_of(inputs, 1.0, 1.0).values())
    # The closed form holds but for gates whose exponential is 0, or 1 by far, in every dtype.
    plain = np.flatnonzero((A_log <= 88) & (np.abs(a) < most) & (np.abs(dt_bias) < most))
    (want, _), _ = closed_form(**{name: x[..., plain] for name, x in inputs.items()})
    np.testing.assert_allclose(g[:, plain], np.maximum(want, -1e6), rtol=1e-5, atol=1e-30)


def test_strong_decay_is_zero_and_its_gradient_too():
    inputs = {"a": jnp.full((1, 1), 200.0), "b": jnp.zeros((1, 1)), "A_log": jnp.full(1, 50.0), "dt_bias": jnp.zeros(1)}
    g, _ = jaxqla.gdn_gates(**inputs)
    assert g[0, 0] == -1e6
    assert {name: float(x.sum()) for name, x in gradients_of(inputs, 1.0, 0.0).items()} == dict.fromkeys(NAMES, 0.0)


@pytest.mark.parametrize("shape", [(3,), (2, 3), (2, 0, 3), (0,), (4, 2, 5, 3)])
def test_any_number_of_rows(shape):
    inputs = arguments(shape=shape)
    (want, _), _ = closed_form(**inputs)
    g, beta = jaxqla.gdn_gates(**inputs)
    assert g.shape == beta.shape == shape
    np.testing.assert_allclose(g, want, rtol=2e-6)


def test_a_mapped_axis_is_one_more_of_rows():
    inputs = arguments(shape=(4, 2, 3))
    mapped = jax.vmap(lambda a, b: jaxqla.gdn_gates(a, b, inputs["A_log"], inputs["dt_bias"]))
    np.testing.assert_array_equal(mapped(inputs["a"], inputs["b"]), jaxqla.gdn_gates(**inputs))


def test_64_bit_mode_changes_nothing_but_takes_wide_arguments():
    inputs = arguments()
    want = jaxqla.gdn_gates(**inputs)
    with jax.enable_x64(True):
        np.testing.assert_array_equal(jaxqla.gdn_gates(**inputs), want)
        wide = {name: x.astype(jnp.float64) for name, x in inputs.items()}
        got = jaxqla.gdn_gates(**wide)
        assert {x.dtype for x in got} == {jnp.dtype(jnp.float32)}
        np.testing.assert_array_equal(got, want)
        assert gradients_of(wide, 1.0, 1.0)["A_log"].dtype == jnp.float64


def test_parameters_that_devices_share_get_one_sum_of_gradients():
    inputs = arguments(shape=(8, 5, 3))
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    specs = {"a": P("data"), "b": P("data"), "A_log": P(), "dt_bias": P()}
    shards = {name: jax.device_put(x, NamedSharding(mesh, specs[name])) for name, x in inputs.items()}

    def loss(inputs, split):
        def gates(inputs):
            return jaxqla.gdn_gates(**inputs)

        if split:
            gates = jax.shard_map(gates, mesh=mesh, in_specs=(specs,), out_specs=P("data"))
        return sum(jnp.sum(jnp.sin(x)) for x in gates(inputs))

    alone = jax.grad(loss)(inputs, False)
    for split in (False, True):
        gradient = jax.jit(lambda x, split=split: jax.grad(loss)(x, split))
        assert collectives(gradient, shards) == {"all-reduce": 1}
        for name, x in gradient(shards).items():
            np.testing.assert_allclose(x, alone[name], rtol=1e-5, atol=1e-6, err_msg=name)


WRONG = {
    "no rows": ({"a": np.float32(1)}, ValueError, "a must have at least 1 dimension (..., HV), got shape ()"),
    "b shape": ({"b": np.ones((2, 3))}, ValueError, "b must have the shape of a = (2, 5, 3), got (2, 3)"),
    "A_log shape": ({"A_log": np.ones(5)}, ValueError, "A_log must have shape (HV) = (3,), got (5,)"),
    "dt_bias shape": ({"dt_bias": np.ones((1, 3))}, ValueError, "dt_bias must have shape (HV) = (3,), got (1, 3)"),
    "list": ({"dt_bias": [1.0, 2.0, 3.0]}, TypeError, "dt_bias must be an array, got list"),
    "None": ({"A_log": None}, TypeError, "A_log must be an array, got None"),
    "integer": ({"b": np.ones((2, 5, 3), np.int32)}, TypeError, "b must have a floating dtype, got int32"),
    "flag": (
        {"allow_neg_eigval": 2},
        TypeError,
        "allow_neg_eigval must be True or False, a Python value, got int",
    ),
}


@pytest.mark.parametrize(("changes", "error", "text"), WRONG.values(), ids=WRONG)
def test_wrong_arguments_are_named(changes, error, text):
    with pytest.raises(error, match=f"^gdn_gates: {re.escape(text)}$"):
        jaxqla.gdn_gates(**(arguments() | changes))
