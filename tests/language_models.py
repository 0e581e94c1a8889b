"""One batch and one compiled step for all tests of the models, so that they compile it once for each kind of model."""

from typing import Any

import jax
import numpy as np

from jaxqla.models import QwenForCausalLM, next_token_loss

# Lengths of the documents of each row; negative ones are padding. Packed; padded left; padded right; both between.
ROWS = ((31, 1, 38), (-17, 53), (40, -30), (20, -5, 45))
VOCAB = 96


def _segment_ids() -> np.ndarray:
    return np.array([np.repeat([0 if n < 0 else i + 1 for i, n in enumerate(row)], np.abs(row)) for row in ROWS])


SEGMENT_IDS = _segment_ids().astype(np.int32)
B, T = SEGMENT_IDS.shape
TOKENS = np.random.default_rng(0).integers(1, VOCAB, (B, T)).astype(np.int32)
# Where each document is: a row and a slice of its tokens.
DOCUMENTS = [
    (b, slice(*(np.flatnonzero(SEGMENT_IDS[b] == i)[[0, -1]] + [0, 1])))
    for b in range(B)
    for i in np.unique(SEGMENT_IDS[b])
    if i
]
# Half the time to compile; these run once.
FAST = {"xla_backend_optimization_level": 0}


def _loss_and_logits(model: QwenForCausalLM, tokens: Any, segment_ids: Any) -> tuple[Any, Any]:
    return next_token_loss(model, tokens, segment_ids=segment_ids)[0], model(tokens, segment_ids=segment_ids)


step = jax.jit(jax.value_and_grad(_loss_and_logits, has_aux=True), compiler_options=FAST)
forward = jax.jit(lambda model, tokens: model(tokens), compiler_options=FAST)


def relative(actual: Any, expected: Any) -> float:
    """The error over the size of the truth, in the mean of squares; infinite where anything is not finite."""
    actual, expected = (np.asarray(x, np.float64) for x in (actual, expected))
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    error = np.linalg.norm(actual - expected) / np.linalg.norm(expected)
    return float(error) if np.isfinite(error) else float("inf")
