"""The loss of a language model, without the logits of a whole batch in memory."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxqla.models.qwen import QwenForCausalLM

# Tokens whose logits are there at once; with a vocabulary of 248,320 they are two gigabytes.
_CHUNK = 2048


def next_token_loss(
    model: QwenForCausalLM,
    tokens: Int[Array, "B T"],
    *,
    segment_ids: Int[Array, "B T"] | None = None,
    positions: Int[Array, "B T"] | None = None,
) -> tuple[Float[Array, ""], Int[Array, ""]]:
    """Mean cross entropy of each token given those before it in its document, in float32.

    The logits are computed a few tokens at a time, and again in the backward.

    Args:
        model: The model.
        tokens: Ids, int32.
        segment_ids: Int32; 0 is padding, on any side, and a change of id starts another document. The first token of a
            document is not predicted.
        positions: As in the model's call.

    Returns:
        The mean over the tokens that are predicted, 0 where there are none, and their number, int32.
    """
    hidden, _ = model.hidden_states(tokens, segment_ids=segment_ids, positions=positions)
    hidden, targets = hidden[:, :-1], tokens[:, 1:]
    if segment_ids is None:
        weights = jnp.ones(targets.shape, jnp.float32)
    else:
        same = (segment_ids[:, 1:] == segment_ids[:, :-1]) & (segment_ids[:, 1:] != 0)
        weights = same.astype(jnp.float32)

    def total(hidden: Array, targets: Array, weights: Array) -> Array:
        logits = model.logits(hidden)
        chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
        return jnp.sum(weights * (jax.nn.logsumexp(logits, axis=-1) - chosen))

    # Pieces of every row, so that rows stay where they are on a mesh.
    B, T = targets.shape
    size = max(1, _CHUNK // max(B, 1))
    count = -(-T // size)

    def split(x: Array) -> Array:
        x = jnp.pad(x, ((0, 0), (0, count * size - T), *[(0, 0)] * (x.ndim - 2)))
        return x.reshape(B, count, size, *x.shape[2:]).swapaxes(0, 1)

    sums = lax.map(lambda xs: jax.checkpoint(total)(*xs), (split(hidden), split(targets), split(weights)))
    predicted = jnp.sum(weights)
    return jnp.sum(sums) / jnp.maximum(predicted, 1), predicted.astype(jnp.int32)
