"""A training step of a small hybrid (one layer with the op, one with attention) on data x fsdp x tensor devices."""

import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxqla

B, T, D, H, HV, W, F = 8, 48, 16, 2, 4, 8, 32
PROJECTION, OUTPUT = P("fsdp", "tensor", None), P("tensor", None, "fsdp")
UP, DOWN = P("fsdp", "tensor"), P("tensor", "fsdp")
# Weights of the op's layer, of the attention layer, and of the two layers after them: shape and how it is split.
WEIGHTS = {
    "q": ((D, H, W), PROJECTION),
    "k": ((D, H, W), PROJECTION),
    "v": ((D, HV, W), PROJECTION),
    "gate": ((D, HV), UP),
    "beta": ((D, HV), UP),
    "A_log": ((HV,), P("tensor")),
    "out": ((HV, W, D), OUTPUT),
    "attention q": ((D, HV, W), PROJECTION),
    "attention k": ((D, H, W), PROJECTION),
    "attention v": ((D, H, W), PROJECTION),
    "attention out": ((HV, W, D), OUTPUT),
    "up 0": ((D, F), UP),
    "down 0": ((F, D), DOWN),
    "up 1": ((D, F), UP),
    "down 1": ((F, D), DOWN),
}
COLLECTIVE = re.compile(r" (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(")


def norm(x):
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def heads(x, *weights):
    return [jnp.einsum("btd,dhk->bthk", x, w) for w in weights]


def loss(w, x, segment_ids):
    h = norm(x)
    q, k, v = heads(h, w["q"], w["k"], w["v"])
    g = -jnp.exp(w["A_log"]) * jax.nn.softplus(h @ w["gate"])
    beta = jax.nn.sigmoid(h @ w["beta"])
    o, _ = jaxqla.gated_delta(q, k, v, g, beta, segment_ids=segment_ids, qk_l2norm=True)
    x = x + jnp.einsum("bthk,hkd->btd", o, w["out"])
    x = x + jax.nn.silu(norm(x) @ w["up 0"]) @ w["down 0"]
    q, k, v = heads(norm(x), w["attention q"], w["attention k"], w["attention v"])
    same = segment_ids[:, None, :, None] == segment_ids[:, None, None, :]
    o = jax.nn.dot_product_attention(q, k, v, is_causal=True, mask=same)
    x = x + jnp.einsum("bthk,hkd->btd", o, w["attention out"])
    x = x + jax.nn.silu(norm(x) @ w["up 1"]) @ w["down 1"]
    return jnp.mean(jnp.where((segment_ids != 0)[..., None], x, 0) ** 2)


@pytest.fixture(scope="module")
def arguments():
    rng = np.random.default_rng(0)
    weights = {name: 0.3 * rng.standard_normal(shape).astype(np.float32) for name, (shape, _) in WEIGHTS.items()}
    x = rng.standard_normal((B, T, D)).astype(np.float32)
    segment_ids = np.repeat([[1, 2, 0]] * B, T // 3, axis=1).astype(np.int32)
    return weights, x, segment_ids


@pytest.fixture(scope="module")
def sharded(arguments):
    """The step compiled for eight devices, and its arguments there."""
    mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
    placements = {name: NamedSharding(mesh, spec) for name, (_, spec) in WEIGHTS.items()}
    rows = NamedSharding(mesh, P(("data", "fsdp")))
    operands = jax.device_put(arguments, (placements, rows, rows))
    step = jax.jit(jax.value_and_grad(loss), out_shardings=(None, placements))
    return step.lower(*operands).compile(), operands


def test_loss_and_gradients_are_those_of_one_device(arguments, sharded):
    step, operands = sharded
    value, gradients = step(*operands)
    expected, expected_gradients = jax.jit(jax.value_and_grad(loss))(*arguments)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    for name, gradient in expected_gradients.items():
        np.testing.assert_allclose(np.asarray(gradients[name]), gradient, rtol=1e-4, atol=1e-6, err_msg=name)


def test_every_collective_has_its_reason(sharded):
    # The table of docs/sharding.md.
    found = Counter()
    for line in sharded[0].as_text().splitlines():
        if not (collective := COLLECTIVE.search(line)):
            continue
        source = re.search(r'op_name="([^"]*)"', line)[1]
        assert "gated_delta" not in source
        backward = "transpose" in source
        found[collective[1], "backward" if backward else "forward"] += 1
    split = [name for name, (_, spec) in WEIGHTS.items() if "fsdp" in spec]
    assert found.pop(("all-gather", "forward")) == len(split)
    # Over tensor: the products that sum over heads or over the wide axis.
    assert found.pop(("all-reduce", "forward")) == 4
    # Over tensor: the same of the gradients of the inputs. Over fsdp and data: gradients of weights; and of the rest.
    assert 3 <= found.pop(("all-reduce", "backward"), 0) + found.pop(("reduce-scatter", "backward"), 0) <= 8
    assert not found
