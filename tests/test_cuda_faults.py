"""The kernels on a GPU, where others have failed: ragged ends, stale memory, races, huge and tiny numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxqla import _cuda
from tests import cases, tolerance
from tests.test_cuda import assert_bits_equal, check, op, segments, truth, with_tile

pytestmark = pytest.mark.gpu

# Most cases are one sequence in front of padding: programs of one shape, so few are compiled.
ROWS = 200


def one_sequence(length: int, **options) -> cases.Inputs:
    return cases.make(
        **{"B": 1, "T": ROWS, "H": 1, "HV": 2, "cu_seqlens": [0, length], "initial_state": True, **options}
    )


# -- ragged ends and stale memory --------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 33, 63, 64, 65, 127, 130])
def test_rows_after_the_end_may_hold_anything(length):
    check(one_sequence(length, seed=length).poisoned())


def into_poison(function, *arrays):
    """The results of `function`, written over NaN: they take the buffers of arrays that are given away."""
    dead = [jnp.full(x.shape, jnp.nan, x.dtype) for x in jax.eval_shape(function, *arrays)]
    places = [x.unsafe_buffer_pointer() for x in dead]
    call = jax.jit(lambda dead, *arrays: function(*arrays), donate_argnums=0, keep_unused=True)
    compiled = call.lower(dead, *arrays).compile()
    assert " copy(" not in compiled.as_text(), "a result that is copied into its buffer hides what was left unwritten"
    results = compiled(dead, *arrays)
    assert [x.unsafe_buffer_pointer() for x in results] == places
    return results


@pytest.mark.parametrize("v_tile", [64, 128])
def test_every_element_of_a_result_is_written(v_tile):
    inputs = cases.make(B=1, T=310, H=2, HV=4, cu_seqlens=[0, 0, 64, 64, 65, 193, 193], initial_state=True).poisoned()
    q, k, v, g, beta, state = (x if x is inputs.initial_state else x[0] for x in inputs[:6])
    packed = _cuda.pack(1, 310, None, inputs.cu_seqlens)

    def inverse(k, g, beta, *packed):
        return _cuda.chunk_inverse(k, g, beta, _cuda.Packed(*packed), kernel="gdn_chunk_inverse_bf16")

    def fused(q, k, v, a, g_cum, state, *packed):
        return _cuda.fused_forward(
            q,
            k,
            v,
            a,
            g_cum,
            _cuda.Packed(*packed),
            state,
            scale=128**-0.5,
            return_final_state=True,
            kernel=f"gdn_fused_forward_bf16_v{v_tile}",
        )

    # What the inverse leaves NaN are chunks that no sequence has; the fused kernel must not look at them.
    a, g_cum = into_poison(inverse, k, g, beta, *packed)
    o, final_state = into_poison(fused, q, k, v, a, g_cum, state, *packed)
    expected_o, expected_state = with_tile(*inputs, v_tile=v_tile)
    assert_bits_equal(o[None], expected_o)
    assert_bits_equal(final_state, expected_state)


def test_segments_do_not_leak():
    inputs = cases.make(B=3, T=330, H=2, HV=4, segment_ids=segments(), initial_state=True)
    # The second segment of the first row: it starts with a chunk, and ends inside one.
    inside = np.zeros((3, 330, 1, 1), bool)
    inside[0, 64:200] = True
    other = inputs._replace(k=jnp.where(inside, -inputs.k, inputs.k), v=jnp.where(inside, 100, inputs.v))
    (o, state), (o_other, state_other) = op(*inputs), op(*other)
    same = np.asarray(o == o_other).all((2, 3))
    assert same[0, :64].all()
    assert not same[0, 64:100].any()
    assert same[0, 200:].all()
    assert same[1:].all()
    assert_bits_equal(state, state_other)


# -- races -------------------------------------------------------------------------------------------------------------

bits_differ = jax.jit(lambda xs, ys: jnp.stack([jnp.any(x != y) for x, y in zip(xs, ys, strict=True)]).any())


@pytest.mark.parametrize("v_tile", [64, 128])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_each_kernel_repeats_itself_beside_other_work(dtype, v_tile):
    import torch

    boundaries = np.cumsum([0, 63, 65, 127, 1000, 4097])
    inputs = cases.make(B=1, T=int(boundaries[-1]), H=3, HV=27, cu_seqlens=boundaries, dtype=dtype)
    first = with_tile(*inputs, v_tile=v_tile)
    assert all(bool(jnp.isfinite(x).all()) for x in first)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        busy = torch.ones(2048, 2048, device="cuda", dtype=torch.bfloat16)
    differ = []
    for _ in range(50):
        with torch.cuda.stream(side):
            for _ in range(5):
                torch.mm(busy, busy)
        differ.append(bits_differ(first, with_tile(*inputs, v_tile=v_tile)))
    assert not any(bool(x) for x in differ)
    side.synchronize()


# -- sizes -------------------------------------------------------------------------------------------------------------


def test_more_state_elements_than_32_bits_count():
    N, HV, tokens = 4200, 32, 300
    # Sequences of 0 to 9 tokens at both ends, and empty ones between.
    lengths = np.zeros(N, np.int64)
    lengths[:30], lengths[-30:] = np.arange(30) % 10, np.arange(30) % 10
    boundaries = np.concatenate([[0], np.cumsum(lengths)])
    # The state comes from the device: the host would take a minute.
    inputs = cases.make(B=1, T=tokens, H=1, HV=HV, cu_seqlens=boundaries, initial_state=np.zeros(0)).poisoned()
    state = jax.random.normal(jax.random.key(0), (N, HV, 128, 128), jnp.float32)
    assert state.size > 2**31
    o, final_state = op(*inputs._replace(initial_state=state))
    changed = jax.jit(lambda a, b: jnp.any(a != b, axis=(1, 2, 3)))(state, final_state)
    assert (np.asarray(changed) == (lengths > 0)).all()
    start = int(boundaries[-2])
    tail = [x[:, start : start + 9] for x in inputs[:5]]
    o_alone, state_alone = op(*tail, state[-1:], None, jnp.asarray([0, 9], jnp.int32))
    assert lengths[-1] == 9
    assert_bits_equal(o[:, start : start + 9], o_alone)
    assert_bits_equal(final_state[-1:], state_alone)


# -- numbers -----------------------------------------------------------------------------------------------------------


def test_gates_are_natural_logarithms():
    inputs = one_sequence(3, gates=np.log(0.5), beta=0.0)
    _, state = op(*inputs)
    np.testing.assert_allclose(state, inputs.initial_state / 8, rtol=1e-5)


@pytest.mark.parametrize("difference", [8, 128])
def test_a_small_error_of_a_large_value_is_still_corrected(difference):
    # The state holds v + difference for this key. Half of that must go. Kernels round what the state holds to bfloat16,
    # whose neighbours of 4096 are 32 apart, so they see the difference to within 16.
    inputs = one_sequence(1, gates=0.0, beta=0.5)
    k = jnp.zeros_like(inputs.k).at[..., 0].set(1)
    state = jnp.zeros_like(inputs.initial_state).at[:, :, 0].set(4096 + difference)
    _, final_state = op(*inputs._replace(k=k, v=jnp.full_like(inputs.v, 4096), initial_state=state))
    error = np.abs(np.asarray(final_state)[:, :, 0] - (4096 + difference / 2))
    assert error.max() <= 0.5 * 16
    if difference % 32 == 0:
        assert error.max() <= 0.1 * difference / 2
    assert not np.asarray(final_state)[:, :, 1:].any()


def test_a_large_state_in_float16():
    inputs = cases.make(B=1, T=ROWS, H=1, HV=2, cu_seqlens=[0, 150], initial_state=True, dtype="float16")
    # The largest is about 4e4; float16 ends at 6.5e4.
    check(inputs._replace(initial_state=inputs.initial_state * 8e3))


def test_keys_that_are_too_long_end_in_no_hang_and_spoil_nothing():
    good = one_sequence(ROWS, dtype="float16")
    expected = jax.tree.map(np.asarray, op(*good))
    # |k|^2 is about 128: the state grows without bound, and is infinite before long.
    jax.block_until_ready(op(*one_sequence(ROWS, dtype="float16", normalised=False)))
    for a, b in zip(expected, op(*good), strict=True):
        assert_bits_equal(a, b)


def test_gates_and_steps_in_bfloat16_are_used_as_they_are():
    inputs = one_sequence(150)
    g, beta = inputs.g.astype(jnp.bfloat16), inputs.beta.astype(jnp.bfloat16)
    rounded = inputs._replace(g=g.astype(jnp.float32), beta=beta.astype(jnp.float32))
    for a, b in zip(op(*inputs._replace(g=g, beta=beta)), op(*rounded), strict=True):
        assert_bits_equal(a, b)


@pytest.mark.parametrize(  # every pair of values
    ("initial_state", "return_final_state", "qk_l2norm"),
    [(False, False, False), (False, True, True), (True, False, True), (True, True, False)],
)
def test_all_options_together(initial_state, return_final_state, qk_l2norm):
    inputs = one_sequence(130, initial_state=initial_state)
    o, state = op(*inputs, return_final_state=return_final_state, qk_l2norm=qk_l2norm, scale=0.3)
    expected_o, expected_state = truth(inputs, qk_l2norm=qk_l2norm, scale=0.3)
    assert o.dtype == jnp.bfloat16
    tolerance.check(o, expected_o, "bfloat16", "o", roundings=2 * qk_l2norm)
    if return_final_state:
        assert state.dtype == jnp.float32
        tolerance.check(state, expected_state, "bfloat16", "final_state", roundings=2 * qk_l2norm)
    else:
        assert state is None
