"""Packed rows: three sequences of different lengths and some padding in one row give what three separate calls give."""

import jax
import jax.numpy as jnp
import numpy as np

import jaxqla

LENGTHS = (70, 5, 120)
PADDING = 9
H, HV, K, V = 2, 4, 64, 96


def make_inputs(T: int, seed: int = 0) -> dict[str, jax.Array]:
    """Random inputs of one row of `T` tokens."""
    keys = jax.random.split(jax.random.key(seed), 5)
    return {
        "q": jax.random.normal(keys[0], (1, T, H, K)),
        "k": jax.random.normal(keys[1], (1, T, H, K)),
        "v": jax.random.normal(keys[2], (1, T, HV, V)),
        "g": jax.nn.log_sigmoid(jax.random.normal(keys[3], (1, T, HV)) + 3),
        "beta": jax.nn.sigmoid(jax.random.normal(keys[4], (1, T, HV))),
    }


def main() -> None:
    """Compares the packed row with the separate calls, and fails if they differ."""
    gated_delta = jax.jit(jaxqla.gated_delta, static_argnames="qk_l2norm")
    inputs = make_inputs(sum(LENGTHS) + PADDING)
    # 1, 2, 3 for the sequences, 0 for padding: it neither reads nor writes the state, and its output is 0.
    ids = np.repeat([*range(1, len(LENGTHS) + 1), 0], [*LENGTHS, PADDING])
    packed, _ = gated_delta(**inputs, segment_ids=jnp.asarray(ids, jnp.int32)[None], qk_l2norm=True)

    start = 0
    for number, length in enumerate(LENGTHS, 1):
        rows = slice(start, start + length)
        alone, _ = gated_delta(**{name: x[:, rows] for name, x in inputs.items()}, qk_l2norm=True)
        error = float(jnp.max(jnp.abs(packed[:, rows] - alone)))
        print(f"sequence {number}, {length:3d} tokens: packed and alone differ by at most {error:.1e}")
        np.testing.assert_allclose(packed[:, rows], alone, rtol=1e-4, atol=1e-4)
        start += length
    assert not np.any(packed[:, start:])
    print(f"padding,    {PADDING:3d} tokens: output is 0")


if __name__ == "__main__":
    main()
