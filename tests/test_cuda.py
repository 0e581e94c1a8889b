"""The kernels on a GPU, against the float64 oracle on the same rounded inputs: `python -m pytest -m gpu`."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxqla
from jaxqla import _cuda, reference
from tests import cases, tolerance

pytestmark = pytest.mark.gpu

SUFFIX = {"bfloat16": "bf16", "float16": "fp16"}


@functools.partial(jax.jit, static_argnames=("scale", "qk_l2norm"))
def _oracle(q, k, v, g, beta, initial_state, segment_ids, cu_seqlens, *, scale=None, qk_l2norm=False):
    return reference.gated_delta(
        q,
        k,
        v,
        g,
        beta,
        initial_state=initial_state,
        segment_ids=segment_ids,
        cu_seqlens=cu_seqlens,
        return_final_state=True,
        scale=scale,
        qk_l2norm=qk_l2norm,
        dtype=jnp.float64,
    )


def truth(inputs: cases.Inputs, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    with jax.enable_x64(True):
        return jax.tree.map(np.asarray, _oracle(*inputs, **options))


@functools.partial(jax.jit, static_argnames=("scale", "qk_l2norm", "return_final_state"))
def op(q, k, v, g, beta, initial_state=None, segment_ids=None, cu_seqlens=None, **options):
    options = {"return_final_state": True, **options}
    return jaxqla.gated_delta(
        q,
        k,
        v,
        g,
        beta,
        initial_state=initial_state,
        segment_ids=segment_ids,
        cu_seqlens=cu_seqlens,
        implementation="cuda",
        **options,
    )


@functools.partial(jax.jit, static_argnames=("v_tile", "scale", "qk_l2norm"))
def with_tile(*arrays, v_tile, scale=None, qk_l2norm=False):
    """The kernels with a V tile of our choice."""
    suffix = SUFFIX[arrays[0].dtype.name]
    return _cuda.forward(
        *arrays,
        scale=128**-0.5 if scale is None else scale,
        qk_l2norm=qk_l2norm,
        return_final_state=True,
        inverse_kernel=f"gdn_chunk_inverse_{suffix}",
        fused_kernel=f"gdn_fused_forward_{suffix}_v{v_tile}",
    )


def assert_bits_equal(a: Any, b: Any) -> None:
    a, b = np.asarray(a), np.asarray(b)
    assert a.dtype == b.dtype
    assert a.shape == b.shape
    assert a.tobytes() == b.tobytes()


def check(inputs: cases.Inputs, roundings: int = 0, **options: Any) -> None:
    """Both V tiles against the oracle; they agree to the bit, since no sum crosses a column of V."""
    o, state = with_tile(*inputs, v_tile=64, **options)
    expected_o, expected_state = truth(inputs, **options)
    dtype = inputs.q.dtype
    assert o.dtype == dtype
    assert state.dtype == jnp.float32
    tolerance.check(o, expected_o, dtype, "o", roundings)
    tolerance.check(state, expected_state, dtype, "final_state", roundings)
    assert not np.asarray(o, np.float32)[inputs.padding].any()
    wide_o, wide_state = with_tile(*inputs, v_tile=128, **options)
    assert_bits_equal(o, wide_o)
    assert_bits_equal(state, wide_state)


# -- shapes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("T", [1, 2, 63, 64, 65, 127, 1000, 4097, 32768])
def test_numbers_of_tokens(T):
    check(cases.make(B=1, T=T, H=1, HV=2, initial_state=True))


@pytest.mark.parametrize("T", [1, 65, 1000, 32769])
def test_float16(T):
    check(cases.make(B=1, T=T, H=1, HV=2, initial_state=True, dtype="float16"))


@pytest.mark.parametrize("return_final_state", [True, False])
def test_no_tokens(return_final_state):
    inputs = cases.make(B=2, T=0, H=1, HV=2, initial_state=True)
    o, state = op(*inputs, return_final_state=return_final_state)
    assert o.shape == inputs.v.shape
    if return_final_state:
        assert_bits_equal(state, inputs.initial_state)


@pytest.mark.parametrize(("B", "H", "HV"), [(1, 1, 1), (1, 1, 2), (2, 2, 4), (3, 11, 11), (4, 11, 33), (5, 40, 40)])
def test_numbers_of_states(B, H, HV):
    check(cases.make(B=B, T=130, H=H, HV=HV, initial_state=True))


@pytest.mark.parametrize(("H", "HV"), [(1, 1), (2, 8), (4, 4), (16, 48), (16, 64), (1, 9)])
def test_heads(H, HV):
    check(cases.make(B=1, T=200, H=H, HV=HV))


def test_many_sequences():
    N, H, HV = 2100, 16, 32
    rng = np.random.default_rng(1)
    lengths = np.where(rng.random(N) < 0.05, rng.integers(0, 130, N), rng.integers(0, 8, N))
    boundaries = np.concatenate([[0], np.cumsum(lengths)])
    T = int(boundaries[-1]) + 40
    # An empty state, for a random one would be drawn before it is left out, and takes the host ten seconds.
    inputs = cases.make(B=1, T=T, H=H, HV=HV, cu_seqlens=boundaries, initial_state=np.zeros(0)).poisoned()
    inputs = inputs._replace(initial_state=None)
    o, state = op(*inputs)
    assert not np.asarray(o, np.float32)[0, boundaries[-1] :].any()
    # The truth of the last key head, each sequence in a row of its own.
    rows = np.minimum(boundaries[:-1, None] + np.arange(130), inputs.q.shape[1] - 1)
    inside = np.arange(130) < lengths[:, None]
    heads = {"q": slice(H - 1, H), "k": slice(H - 1, H)}
    dense = {
        name: getattr(inputs, name)[0, :, heads.get(name, slice(HV - 2, HV))][rows]
        for name in ("q", "k", "v", "g", "beta")
    }
    expected_o, expected_state = truth(
        cases.Inputs(**dense, initial_state=None, segment_ids=jnp.asarray(inside, jnp.int32), cu_seqlens=None)
    )
    tolerance.check(
        np.asarray(o, np.float64)[0, : boundaries[-1], HV - 2 :], expected_o[inside], "bfloat16", "o", per_head=False
    )
    tolerance.check(state[:, HV - 2 :], expected_state, "bfloat16", "final_state")


def test_more_elements_than_32_bits_count():
    H, HV = 16, 64
    T = 2**31 // (HV * 64) + 130
    tail = 200
    key = jax.random.key(0)
    fill = jax.jit(
        lambda i, shape, dtype: jax.random.normal(jax.random.fold_in(key, i), shape, dtype), static_argnums=(1, 2)
    )
    q, k = (0.1 * fill(i, (1, T, H, 128), jnp.bfloat16) for i in range(2))
    # Of two smaller draws; it repeats nowhere, so that a wrong place shows.
    v = jax.jit(lambda x, y: x[..., None] + y[:, :, None])(
        fill(2, (1, T, HV), jnp.bfloat16), fill(5, (1, T, 128), jnp.bfloat16)
    )
    # The inverses have 64 elements a token and head, v and o have 128: past the reach of unsigned numbers too.
    assert T * HV * 64 > 2**31
    assert v.size > 2**32
    g = -jnp.abs(fill(3, (1, T, HV), jnp.float32))
    beta = jax.nn.sigmoid(fill(4, (1, T, HV), jnp.float32))
    boundaries = jnp.asarray([0, T - tail, T], jnp.int32)
    o, state = op(q, k, v, g, beta, None, None, boundaries)
    alone = [x[:, T - tail :] for x in (q, k, v, g, beta)]
    # A sequence that starts at another place of a chunk grid of its own gives the same bits alone.
    o_alone, state_alone = op(*alone, None, None, jnp.asarray([0, tail], jnp.int32))
    assert_bits_equal(o[:, T - tail :], o_alone)
    assert_bits_equal(state[1:], state_alone)
    expected_o, _ = truth(
        cases.Inputs(*(x[:, :, -4:] if x.shape[2] == HV else x[:, :, -1:] for x in alone), None, None, None)
    )
    tolerance.check(o[:, T - tail :, -4:], expected_o, "bfloat16", "o")


# -- numbers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "gate",
    [
        *(0.0, -1e-4, -2.0, -3.0, -30.0, -60.0, -1e4),
        *("one token of -1e9", "one token of -inf", "half of them 0", "the first of -90, then 0"),
    ],
)
def test_gates(gate):
    g = np.full((1, 300, 4), -0.05)
    if gate == "one token of -1e9":
        g[0, 100, 1:] = -1e9
    elif gate == "one token of -inf":
        g[0, 100, 1:] = -np.inf
    elif gate == "half of them 0":
        g[0, ::2] = 0
    elif gate == "the first of -90, then 0":
        g[:] = 0
        g[0, 0] = -90
    else:
        g[:] = gate
    check(cases.make(B=1, T=300, H=2, HV=4, gates=g, initial_state=True))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_identical_keys_and_full_steps(dtype):
    inputs = cases.make(B=1, T=500, H=1, HV=2, gates=-1e-3, beta=1.0, dtype=dtype)
    # Each token replaces what the last one wrote: a value is a sum of up to 64 rounded differences, each of two values.
    check(inputs._replace(k=jnp.broadcast_to(inputs.k[:, :1], inputs.k.shape)), roundings=2 * 64)


@pytest.mark.parametrize("beta", [0.0, 2.0])
def test_extreme_steps(beta):
    check(cases.make(B=1, T=300, H=1, HV=2, beta=beta, initial_state=True))


@pytest.mark.parametrize("scale", [0.0, -0.7, 1.0])
def test_scale(scale):
    check(cases.make(B=1, T=200, H=1, HV=2), scale=scale)


def test_qk_l2norm():
    inputs = cases.make(B=1, T=200, H=2, HV=4, normalised=False)
    q, k = inputs.q.at[0, 3].set(0), inputs.k.at[0, 70].set(0).at[0, 5].multiply(1e-3).at[0, 6].multiply(100)
    check(inputs._replace(q=q, k=k), qk_l2norm=True)


def test_one_token_by_hand():
    e = jnp.zeros((1, 1, 1, 128), jnp.bfloat16).at[..., 0].set(1)
    o, _ = op(e, e, jnp.ones((1, 1, 1, 128), jnp.bfloat16), jnp.zeros((1, 1, 1)), jnp.ones((1, 1, 1)))
    assert_bits_equal(o, jnp.full((1, 1, 1, 128), 128**-0.5, jnp.bfloat16))


# -- packing -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "boundaries",
    [
        [0, 300],
        [0, 0, 64, 64, 65, 193, 193],
        [0, 1, 2, 3, 130, 257],
        [0, 0, 0],
        [0, 128, 192, 256],
    ],
)
def test_cu_seqlens(boundaries):
    inputs = cases.make(B=1, T=310, H=2, HV=4, cu_seqlens=boundaries, initial_state=True)
    check(inputs)
    clean, poisoned = op(*inputs), op(*inputs.poisoned())
    for a, b in zip(clean, poisoned, strict=True):
        assert_bits_equal(a, b)
    lengths = np.diff(boundaries)
    assert_bits_equal(clean[1][lengths == 0], inputs.initial_state[lengths == 0])


def test_a_sequence_does_not_depend_on_its_neighbours():
    inputs = cases.make(B=1, T=400, H=1, HV=2, cu_seqlens=[0, 37, 101, 102, 400], initial_state=True)
    o, state = op(*inputs)
    alone = inputs._replace(
        **{name: getattr(inputs, name)[:, 37:101] for name in ("q", "k", "v", "g", "beta")},
        initial_state=inputs.initial_state[1:2],
        cu_seqlens=None,
    )
    o_alone, state_alone = op(*alone)
    assert_bits_equal(o[:, 37:101], o_alone)
    assert_bits_equal(state[1:2], state_alone)


def segments(T: int = 330) -> np.ndarray:
    ids = np.zeros((3, T), np.int32)
    ids[0, :64], ids[0, 64:100], ids[0, 110:200], ids[0, 200:260] = 1, 2, 2, 1
    ids[1, 5:70], ids[1, 70:71], ids[1, 71:320] = 7, 3, 7
    ids[2] = 4
    return ids


def test_segment_ids():
    inputs = cases.make(B=3, T=330, H=2, HV=4, segment_ids=segments(), initial_state=True)
    check(inputs)
    for poison in (np.nan, np.inf):
        for a, b in zip(op(*inputs), op(*inputs.poisoned(poison)), strict=True):
            assert_bits_equal(a, b)


def test_all_padding():
    inputs = cases.make(B=2, T=100, H=1, HV=2, segment_ids=np.zeros((2, 100)), initial_state=True).poisoned()
    o, state = op(*inputs)
    assert not np.asarray(o, np.float32).any()
    assert_bits_equal(state, inputs.initial_state)


def test_a_boundary_equals_a_reset_of_the_state():
    ids = np.repeat([[1, 2]], 100, axis=1)
    inputs = cases.make(B=1, T=200, H=1, HV=2, segment_ids=ids)
    o, state = op(*inputs)
    o_packed, state_packed = op(*inputs._replace(segment_ids=None, cu_seqlens=jnp.asarray([0, 100, 200], jnp.int32)))
    tolerance.check(o, np.asarray(o_packed, np.float64), "bfloat16", "o")
    tolerance.check(state, np.asarray(state_packed[1:], np.float64), "bfloat16", "final_state")


# -- states ------------------------------------------------------------------------------------------------------------


def test_no_state_is_a_zero_state():
    inputs = cases.make(B=2, T=150, H=1, HV=2)
    zeros = jnp.zeros((2, 2, 128, 128), jnp.float32)
    for a, b in zip(op(*inputs), op(*inputs._replace(initial_state=zeros)), strict=True):
        assert_bits_equal(a, b)


@pytest.mark.parametrize("pieces", [(37, 1, 62), (64, 36), (128, 64, 8)])
def test_a_call_in_pieces(pieces):
    T = sum(pieces)
    inputs = cases.make(B=2, T=T, H=1, HV=2, initial_state=True)
    state, outputs, start = inputs.initial_state, [], 0
    for length in pieces:
        part = [x[:, start : start + length] for x in inputs[:5]]
        o, state = op(*part, state)
        outputs.append(o)
        start += length
    expected_o, expected_state = truth(inputs)
    tolerance.check(jnp.concatenate(outputs, axis=1), expected_o, "bfloat16", "o")
    tolerance.check(state, expected_state, "bfloat16", "final_state")


def test_a_large_state_keeps_small_updates():
    inputs = cases.make(B=1, T=256, H=1, HV=2, gates=0.0, beta=0.5)
    state = jnp.full((1, 2, 128, 128), 1e3, jnp.float32)
    check(inputs._replace(initial_state=state))


# -- repeatability -----------------------------------------------------------------------------------------------------


def test_fifty_repeats_are_equal_to_the_bit():
    inputs = cases.make(B=1, T=3000, H=4, HV=16, cu_seqlens=[0, 700, 1900, 3000], initial_state=True)
    first = jax.tree.map(np.asarray, op(*inputs))
    for _ in range(50):
        for a, b in zip(first, op(*inputs), strict=True):
            assert_bits_equal(a, b)


def test_memory_holds_nothing_that_matters():
    inputs = cases.make(B=2, T=1000, H=4, HV=8, initial_state=True)
    clean = jax.tree.map(np.asarray, op(*inputs))
    blocks = [jnp.full(2**size, jnp.nan, jnp.float32) for size in range(10, 28) for _ in range(4)]
    jax.block_until_ready(blocks)
    del blocks
    for a, b in zip(clean, op(*inputs), strict=True):
        assert_bits_equal(a, b)


def test_dtypes_take_turns():
    half, brain = (cases.make(B=1, T=100, H=1, HV=1, dtype=dtype) for dtype in ("float16", "bfloat16"))
    first = [op(*x) for x in (half, brain)]  # kept on the device: later calls must not write over them
    again = [op(*x) for x in (brain, half)]
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(again[::-1]), strict=True):
        assert_bits_equal(a, b)


def test_slices_and_transposes_are_read_right():
    inputs = cases.make(B=2, T=96, H=2, HV=2)

    @jax.jit
    def from_one_array(x):
        q, k, v = (x[:, i].transpose(0, 2, 1, 3) for i in range(3))
        return op(q, k, v, inputs.g, inputs.beta)

    packed = jnp.stack([inputs.q, inputs.k, inputs.v], axis=1).transpose(0, 1, 3, 2, 4)
    for a, b in zip(op(*inputs), from_one_array(packed), strict=True):
        assert_bits_equal(a, b)


def test_the_same_in_a_scan():
    inputs = cases.make(B=1, T=70, H=1, HV=2, initial_state=True)

    @jax.jit
    def several(state):
        return lax.scan(lambda state, _: op(*inputs[:5], state)[::-1], state, length=10)

    state = inputs.initial_state
    for _ in range(10):
        o, state = op(*inputs[:5], state)
    scanned_state, scanned_o = several(inputs.initial_state)
    assert_bits_equal(scanned_state, state)
    assert_bits_equal(scanned_o[-1], o)
