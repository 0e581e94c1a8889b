"""Is the plain path right? Judged by the float64 oracle on the same inputs: results and every gradient."""

import collections
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxqla import _xla, reference
from tests import cases, tolerance

SIZES = {"B": 2, "T": 150, "H": 2, "HV": 6, "K": 16, "V": 24, "dtype": "float32", "initial_state": True}
GRADIENTS = ("dq", "dk", "dv", "dg", "dbeta", "dinitial_state")


def make(**options):
    return cases.make(**(SIZES | options))


def cotangents(inputs, *, final=True, seed=7):
    """Of the output, NaN at padding as the inputs may be, and of the final state."""
    rng = np.random.default_rng(seed)
    N = len(inputs.q) if inputs.cu_seqlens is None else len(inputs.cu_seqlens) - 1
    do = jnp.asarray(rng.standard_normal(inputs.v.shape), inputs.v.dtype)
    do = jnp.where(inputs.padding[..., None, None], jnp.nan, do)
    dstate = rng.standard_normal((N, inputs.v.shape[2], inputs.q.shape[3], inputs.v.shape[3]))
    return do, jnp.asarray(dstate, jnp.float32) if final else None


@functools.cache
def compiled(scale, qk_l2norm):
    """Both functions of the path as one program, one for every choice of shapes."""

    @jax.jit
    def both(inputs, do, dstate):
        options = {"scale": scale, "qk_l2norm": qk_l2norm}
        return _xla.forward(*inputs, **options), _xla.backward(*inputs, do, dstate, **options)

    return both


@functools.cache
def compiled_oracle(scale, qk_l2norm):
    @jax.jit
    def both(floats, rest, do, dstate):
        def function(floats):
            options = {"scale": scale, "qk_l2norm": qk_l2norm, "return_final_state": True, "dtype": jnp.float64}
            return reference.gated_delta(**floats, **rest, **options)

        results, vjp = jax.vjp(function, floats)
        return results, vjp((do, jnp.zeros_like(results[1]) if dstate is None else dstate))[0]

    return both


def truth(inputs, do, dstate, *, scale=0.3, qk_l2norm=False):
    """Results and gradients by name, float64."""
    # The oracle never reads padding; what comes back to it must be zero there.
    do = jnp.where(inputs.padding[..., None, None], 0, do)
    rest = {"segment_ids": inputs.segment_ids, "cu_seqlens": inputs.cu_seqlens}
    with jax.enable_x64(True):
        floats, do, dstate = jax.tree.map(lambda x: x.astype(jnp.float64), (inputs.floats, do, dstate))
        (o, state), grads = compiled_oracle(scale, qk_l2norm)(floats, rest, do, dstate)
        named = {"o": o, "final_state": state} | {f"d{name}": x for name, x in grads.items()}
        return {name: np.asarray(x) for name, x in named.items()}


def results(inputs, do, dstate, *, scale=0.3, qk_l2norm=False):
    """The path's results and gradients by name; None of an absent initial state is left out."""
    (o, state), grads = compiled(scale, qk_l2norm)(inputs, do, dstate)
    named = {"o": o, "final_state": state} | dict(zip(GRADIENTS, grads, strict=True))
    return {name: x for name, x in named.items() if x is not None}


def check(inputs, *, final=True, **options):
    """Compares everything with the oracle, within the tolerance of the dtype."""
    got = results(inputs.poisoned(), *cotangents(inputs, final=final), **options)
    want = truth(inputs, *cotangents(inputs, final=final), **options)
    assert got.keys() == want.keys()
    for name, x in got.items():
        tolerance.check(x, want[name], inputs.q.dtype, name)
        if name not in ("final_state", "dinitial_state"):
            np.testing.assert_array_equal(np.asarray(x, np.float64)[inputs.padding], 0, err_msg=name)
    return got


# -- gates and step sizes ----------------------------------------------------------------------------------------------


def mixed_gates():
    g = np.full((1, SIZES["T"], 1), -0.01)
    g[:, ::9], g[:, 70:90] = -100, -1e4
    return g


def strong_then_weak():
    # Differences of cumulative sums would leave the weak gates few digits.
    g = np.full((1, SIZES["T"], 1), -0.01)
    g[:, :40] = -60
    return g


GATES = {
    "from long to short memory": "softplus",
    "none": 0.0,
    "half of them none": np.where(np.arange(SIZES["T"]) % 2, -0.5, 0)[None, :, None],
    "weak": -1e-4,
    "a chunk sums below the exponent range": -2.0,
    "strong": -30.0,
    "forgets": -1e4,
    "minus infinity": -np.inf,
    "mixed": mixed_gates(),
    "strong, then weak": strong_then_weak(),
    "by head": np.array([-1e-4, -0.01, -0.5, -5, -16, 0]),
}


@pytest.mark.parametrize("gates", GATES.values(), ids=GATES)
def test_gates(gates):
    check(make(gates=gates))


@pytest.mark.parametrize("beta", [0.0, 1e-6, 1.0, 2.0])
def test_step_sizes(beta):
    check(make(beta=beta))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("gates", ["softplus", 0.0, -30.0])
def test_narrow_dtypes(dtype, gates):
    got = check(make(dtype=dtype, gates=gates))
    assert {name for name, x in got.items() if x.dtype == dtype} == {"o", "dq", "dk", "dv"}


def test_identical_keys():
    # Powers of the chunk's matrix would be binomial coefficients.
    inputs = make(gates=0.0, beta=1.0)
    check(inputs._replace(k=jnp.broadcast_to(inputs.k[:, :1], inputs.k.shape)))


def test_no_exponent_is_positive(monkeypatch):
    exp = jnp.exp

    @jax.jit
    def largest(inputs):
        exponents = []
        monkeypatch.setattr(jnp, "exp", lambda x: exponents.append(jnp.max(x)) or exp(x))
        layout = _xla._Layout.of(SIZES["T"], None, None)
        _xla._Chunks.of(_xla._Inputs.of(layout, *inputs[:5], False))
        monkeypatch.undo()
        return jnp.stack(exponents)

    for gates in ("softplus", -1e4, mixed_gates()):
        exponents = largest(make(gates=gates))
        assert len(exponents) == 3
        assert max(exponents) == 0


@pytest.mark.parametrize("size", [1, 5, 8, 32, 64])
def test_the_inverse_of_a_chunk(size):
    rng = np.random.default_rng(0)
    k = rng.standard_normal((3, 2, size, 32)) * [[[[1]]], [[[0.1]]], [[[0]]]] + rng.standard_normal((3, 2, 1, 32))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    lower = np.float32(np.tril(k @ k.swapaxes(-1, -2), -1))
    got = jax.jit(_xla._inverse)(lower)
    want = np.linalg.inv(np.eye(size) + lower.astype(np.float64))
    errors = np.linalg.norm(got - want, axis=(-1, -2)) / np.linalg.norm(want, axis=(-1, -2))
    assert errors.max() < 1e-6


# -- sizes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("T", [1, 3, 9, 17, 65])
def test_lengths(T):
    check(make(B=3, T=T))


@pytest.mark.parametrize(("H", "HV", "K", "V"), [(1, 1, 1, 3), (1, 3, 128, 128), (3, 6, 40, 200)])
def test_heads_and_widths(H, HV, K, V):
    check(make(T=70, H=H, HV=HV, K=K, V=V))


def test_a_scale_of_zero_is_one():
    inputs = make(T=70)
    got = results(inputs, *cotangents(inputs), scale=0.0)
    tolerance.check(got["final_state"], truth(inputs, *cotangents(inputs))["final_state"], "float32", "final_state")
    assert not any(np.asarray(got[name]).any() for name in ("o", "dq"))


@pytest.mark.parametrize("state", [False, True])
def test_no_cotangent_of_the_final_state(state):
    got = check(make(T=70, initial_state=state), final=False)
    assert ("dinitial_state" in got) == state
    assert not state or np.asarray(got["dinitial_state"]).any()


# -- normalisation -----------------------------------------------------------------------------------------------------


def test_normalised_keys_of_any_length():
    inputs = make(T=70, normalised=False)
    lengths = np.resize([0, 1e-4, 1e-3, 1, 100], (2, 70, 2, 1))
    check(inputs._replace(q=inputs.q * lengths, k=inputs.k * lengths[:, ::-1]), qk_l2norm=True)


def test_normalised_keys_of_narrow_dtypes_and_at_padding():
    ids = np.where(np.arange(70) % 9 < 7, 1, 0)[None].repeat(2, 0)
    check(make(T=70, normalised=False, dtype="bfloat16", segment_ids=ids), qk_l2norm=True)


# -- several sequences -------------------------------------------------------------------------------------------------


def segments(*runs):
    """A row of ids from runs of (id, length), padded with 0 to 150."""
    ids = np.concatenate([np.full(length, i) for i, length in runs])
    return np.pad(ids, (0, SIZES["T"] - len(ids)))


SEGMENTS = {
    "boundaries between chunks, and one long": (segments((1, 64), (2, 64), (3, 22)), segments((9, 150))),
    "padding before, between and after": (
        segments((0, 3), (1, 67), (2, 30), (0, 10), (2, 20)),
        segments((0, 70), (4, 10), (0, 64), (5, 3)),
    ),
    "ids that come back": (segments((1, 5), (2, 5), (1, 5), (2, 100)), segments((7, 40), (0, 1), (7, 40), (3, 9))),
    "a segment for each token": (np.arange(1, 151), np.resize([1, 2], 150)),
    "nothing but padding": (np.zeros(150), segments((-1, 20), (2**31 - 1, 50))),
}


@pytest.mark.parametrize("rows", SEGMENTS.values(), ids=SEGMENTS)
def test_segments(rows):
    check(make(segment_ids=np.stack(rows)))


def random_boundaries(seed):
    rng = np.random.default_rng(seed)
    inner = np.sort(rng.integers(0, 331, 9))
    return [0, *np.where(rng.random(9) < 0.3, np.roll(inner, 1).clip(max=inner), inner).tolist()]


BOUNDARIES = {
    "ragged": [0, 1, 16, 33, 64, 127, 128, 192, 257, 330],
    "empty ones": [0, 0, 0, 64, 64, 65, 180, 190, 190, 190],
    "one long": [0, 0, 0, 0, 0, 330, 330, 330, 330, 330],
    "nothing but padding": [0] * 10,
    "random 1": random_boundaries(1),
    "random 2": random_boundaries(2),
}


@pytest.mark.parametrize("boundaries", BOUNDARIES.values(), ids=BOUNDARIES)
def test_packed_sequences(boundaries):
    inputs = make(B=1, T=330, cu_seqlens=boundaries)
    got = check(inputs)
    empty = np.diff(boundaries) == 0
    np.testing.assert_array_equal(np.asarray(got["final_state"])[empty], np.asarray(inputs.initial_state)[empty])
    dfinal_state = cotangents(inputs)[1]
    np.testing.assert_array_equal(np.asarray(got["dinitial_state"])[empty], np.asarray(dfinal_state)[empty])


def test_packed_sequences_in_a_short_row():
    check(make(B=1, T=11, cu_seqlens=[0, 1, 1, 9]))


def test_packing_is_the_same_as_rows():
    packed = make(B=1, T=300, cu_seqlens=[0, 150, 300])
    rows = jax.tree.map(lambda x: x.reshape(2, 150, *x.shape[2:]), packed[:5])
    rows = cases.Inputs(*rows, packed.initial_state, None, None)
    do, dstate = cotangents(packed)
    got, want = results(packed, do, dstate), results(rows, do.reshape(rows.v.shape), dstate)
    for name, x in want.items():
        np.testing.assert_allclose(got[name].reshape(x.shape), x, rtol=1e-5, atol=1e-5, err_msg=name)


def test_every_chunk_and_token_has_a_place():
    @jax.jit
    def around(x, cu_seqlens):
        layout = _xla._Layout.of(x.shape[1], None, cu_seqlens)
        return layout.split(x), layout.join(layout.split(x))

    T, N, C = 200, 6, _xla.CHUNK
    x = jnp.arange(1, T + 1)[None]
    rng = np.random.default_rng(3)
    for trial in range(100):
        boundaries = np.sort(rng.integers(0, T + 1, N + 1)) if trial % 4 else np.full(N + 1, rng.integers(0, T + 1))
        boundaries[0] = 0
        chunks, back = (np.asarray(y) for y in around(x, jnp.asarray(boundaries, jnp.int32)))
        np.testing.assert_array_equal(back, np.where(x <= boundaries[-1], x, 0))
        assert chunks.shape == (T // C + N, 1, C)
        assert sorted(chunks[chunks > 0]) == list(range(1, boundaries[-1] + 1))
        # A chunk starts at a multiple of C from the start of a sequence, and holds nothing of another.
        owners = np.searchsorted(boundaries, chunks - 1, side="right") - 1
        first, owner = chunks[:, 0, 0] - 1, owners[:, 0, 0]
        used = first >= 0
        assert ((first - boundaries[owner])[used] % C == 0).all()
        assert (owners[:, 0] == owner[:, None])[chunks[:, 0] > 0].all()


# -- long memory, large numbers ----------------------------------------------------------------------------------------


def test_calls_in_pieces_hand_on_their_state():
    whole = make(T=100, dtype="bfloat16")
    forward = jax.jit(functools.partial(_xla.forward, scale=1.0, qk_l2norm=False))
    want, want_state = forward(*whole)
    state, outputs = whole.initial_state, []
    for start, end in ((0, 37), (37, 38), (38, 100)):
        o, state = forward(*(x[:, start:end] for x in whole[:5]), state, None, None)
        outputs.append(o)
    assert tolerance.relative_rms(state, want_state, head_axis=1) < tolerance.limit("bfloat16", "final_state")
    assert tolerance.relative_rms(jnp.concatenate(outputs, axis=1), want) < tolerance.limit("bfloat16", "o")


def test_four_thousand_tokens():
    inputs = make(B=1, T=4096, H=1, HV=2, K=8, V=8, gates=-0.001)
    check(inputs)


def test_a_small_error_of_a_large_value_is_not_lost():
    # The state holds v + r for a one-hot key; what is written back is -r.
    k = jnp.zeros((1, 1, 1, 16), jnp.bfloat16).at[..., 3].set(1)
    v = jnp.full((1, 1, 1, 8), 4096, jnp.bfloat16)
    state = jnp.zeros((1, 1, 16, 8)).at[:, :, 3].set(4096.0 + 128)
    g, beta = jnp.zeros((1, 1, 1)), jnp.full((1, 1, 1), 0.5)
    _, final_state = _xla.forward(k, k, v, g, beta, state, None, None, scale=1.0, qk_l2norm=False)
    np.testing.assert_allclose(final_state[0, 0, 3], 4096 + 64, atol=6.4)


def test_a_state_out_of_the_range_of_float16():
    inputs = make(T=70, dtype="float16", gates=-0.01)
    inputs = inputs._replace(initial_state=1e6 * inputs.initial_state)
    got = results(inputs, *cotangents(inputs), scale=1e-4)
    want = truth(inputs, *cotangents(inputs), scale=1e-4)
    for name in ("o", "final_state", "dinitial_state"):
        tolerance.check(got[name], want[name], "float16", name)


# -- gradients of gradients --------------------------------------------------------------------------------------------


def second_order(function, floats, weights):
    """The gradient of a scalar of the gradients."""

    def loss(floats):
        return sum(jnp.sum(w * x) for w, x in zip(weights, function(floats), strict=True))

    def slope(floats):
        return sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(jax.grad(loss)(floats)))

    return jax.jit(jax.grad(slope))(floats)


def test_gradients_of_the_backward():
    inputs = make(B=1, T=70, H=1, HV=2, K=4, V=3, cu_seqlens=[0, 30, 30, 69])
    rest = {"segment_ids": inputs.segment_ids, "cu_seqlens": inputs.cu_seqlens}
    do, dstate = (jnp.nan_to_num(x) for x in cotangents(inputs))

    @jax.custom_vjp
    def path(floats):
        return _xla.forward(**floats, **rest, scale=0.3, qk_l2norm=True)

    def path_bwd(floats, cotangents):
        arguments = dict(zip(("do", "dfinal_state"), cotangents, strict=True)) | floats | rest
        gradients = _xla.backward(**arguments, scale=0.3, qk_l2norm=True)
        return (dict(zip(cases.FLOATS, gradients, strict=True)),)

    path.defvjp(lambda floats: (path(floats), floats), path_bwd)
    got = second_order(path, inputs.floats, (do, dstate))
    with jax.enable_x64(True):

        def oracle(floats):
            options = {"scale": 0.3, "qk_l2norm": True, "return_final_state": True, "dtype": jnp.float64}
            return reference.gated_delta(**floats, **rest, **options)

        floats, do, dstate = jax.tree.map(lambda x: x.astype(jnp.float64), (inputs.floats, do, dstate))
        want = second_order(oracle, floats, (do, dstate))
    for name, x in got.items():
        error = tolerance.relative_rms(x, want[name], head_axis=1 if name == "initial_state" else 2)
        assert error < 1e-5, f"{name}: relative RMS {error:.1e}"


# -- what it costs -----------------------------------------------------------------------------------------------------


def loop_lengths(jaxpr):
    """Lengths of the loops of a program, those within others too."""
    for equation in jaxpr.eqns:
        # Unrolled loops are none on the device.
        if equation.primitive.name == "scan" and equation.params["unroll"] < equation.params["length"]:
            yield equation.params["length"]
        assert equation.primitive.name != "while"
        for parameter in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
            if hasattr(parameter, "eqns") or hasattr(parameter, "jaxpr"):
                yield from loop_lengths(getattr(parameter, "jaxpr", parameter))


@pytest.mark.parametrize("packing", [{"B": 2}, {"B": 1, "cu_seqlens": [0, 100, 640]}])
def test_loops_are_over_chunks_and_the_rows_of_a_block(packing):
    inputs = make(T=640, dtype="bfloat16", **packing)
    chunks = 10 if packing["B"] == 2 else 12
    for function, count in ((_xla.forward, 1), (_xla.backward, 2)):
        call = functools.partial(function, scale=1.0, qk_l2norm=True)
        extra = () if count == 1 else cotangents(inputs)
        lengths = sorted(loop_lengths(jax.make_jaxpr(call)(*inputs, *extra).jaxpr))
        assert lengths == [_xla.BLOCK - 1, *[chunks] * count]


def test_memory_of_the_backward_is_a_few_arrays_of_tokens_and_two_states_a_chunk():
    def temporary_bytes(T):
        inputs = jax.eval_shape(lambda: make(B=1, T=T, H=2, HV=4, K=128, V=128, dtype="bfloat16"))
        call = functools.partial(_xla.backward, scale=1.0, qk_l2norm=False)
        compiled = jax.jit(call).lower(*inputs, inputs.v, None).compile()
        return compiled.memory_analysis().temp_size_in_bytes / 4

    # Bytes a token and head, of which the states are 1024; a state a token would be 65536.
    slope = (temporary_bytes(2048) - temporary_bytes(1024)) / 1024
    assert 1024 < slope < 32 * 128 * 4


def products(function, platform, *arguments):
    """How many products of which operands a program has; those of the highest precision apart."""
    text = jax.jit(function).trace(*arguments).lower(lowering_platforms=(platform,)).as_text()
    lines = [line for line in text.splitlines() if "dot_general" in line]
    operands = (" ".join(re.findall(r"x([a-z]\w+)>", line)[:2]) for line in lines)
    highest = (" HIGHEST" if "HIGHEST" in line else "" for line in lines)
    return collections.Counter(a + b for a, b in zip(operands, highest, strict=True))


def test_accelerators_multiply_bfloat16():
    inputs = jax.eval_shape(lambda: make(dtype="bfloat16"))
    forward = functools.partial(_xla.forward, scale=1.0, qk_l2norm=False)
    for platform, name in (("cuda", "bf16 bf16"), ("tpu", "bf16 bf16"), ("cpu", "f32 f32")):
        # Those of the highest precision are sums of gates and the inverse.
        assert products(forward, platform, *inputs) == {name: 7, "f32 f32 HIGHEST": 7}


def test_gradients_of_the_backward_lower_for_cuda_with_operands_of_one_dtype():
    inputs = jax.eval_shape(lambda: make(dtype="bfloat16"))

    def second(do, dstate, *floats):
        def backward(*floats):
            return _xla.backward(*floats, None, None, do, dstate, scale=1.0, qk_l2norm=True)

        gradients, vjp = jax.vjp(backward, *floats)
        return vjp(gradients)

    kinds = products(second, "cuda", inputs.v, inputs.initial_state, *inputs[:6])
    assert set(kinds) == {"bf16 bf16", "f32 f32", "f32 f32 HIGHEST"}
