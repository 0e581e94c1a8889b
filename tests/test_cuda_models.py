"""Layers and models on a GPU: the same numbers as by plain JAX, there and in one piece."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax")

from flax import nnx

from jaxqla.flax import GatedAttention
from jaxqla.models import QwenConfig, QwenForCausalLM, next_token_loss

pytestmark = pytest.mark.gpu

GDN, ATTENTION = "linear_attention", "full_attention"
CONFIG = QwenConfig(
    model_type="qwen3_5_text",
    vocab_size=512,
    hidden_size=256,
    intermediate_size=512,
    layer_types=(GDN, GDN, GDN, ATTENTION),
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=128,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    tie_word_embeddings=True,
)
# Documents, one padded on the left.
SEGMENT_IDS = jnp.asarray(np.stack([np.repeat([1, 2, 3], [100, 137, 63]), np.repeat([0, 1, 2], [37, 200, 63])]))
TOKENS = jnp.asarray(np.random.default_rng(0).integers(1, 512, SEGMENT_IDS.shape), jnp.int32)


def relative(actual, expected):
    actual, expected = (np.asarray(x, np.float64) for x in (actual, expected))
    return np.linalg.norm(actual - expected) / np.linalg.norm(expected)


def make(implementation, dtype, attention="xla"):
    options = {"implementation": implementation, "attention_implementation": attention}
    return QwenForCausalLM(CONFIG, dtype=dtype, scan_layers=True, rngs=nnx.Rngs(params=0), **options)


@jax.jit
def loss_and_gradients(model):
    def loss(model):
        return next_token_loss(model, TOKENS, segment_ids=SEGMENT_IDS)[0]

    return nnx.value_and_grad(loss)(model)


@pytest.mark.parametrize("segment_ids", [SEGMENT_IDS, None], ids=["packed", "one document a row"])
def test_attention_of_cudnn(segment_ids):
    def run(implementation, dtype):
        layer = GatedAttention(256, 4, 2, head_dim=256, dtype=dtype, implementation=implementation, rngs=nnx.Rngs(0))
        x = jax.random.normal(jax.random.key(1), (*TOKENS.shape, 256))

        def total(x):
            y = layer(x, segment_ids=segment_ids).astype(jnp.float32)
            return jnp.sum(jnp.sin(y)), y

        (_, y), dx = jax.jit(jax.value_and_grad(total, has_aux=True))(x)
        return y, dx

    with jax.default_matmul_precision("highest"):
        expected = run("xla", jnp.float32)
    for implementation in ("xla", "cudnn"):
        for got, want in zip(run(implementation, jnp.bfloat16), expected, strict=True):
            assert relative(got, want) <= 2e-2, implementation


def test_a_model_on_kernels_has_the_loss_and_gradients_of_plain_jax():
    with jax.default_matmul_precision("highest"):
        loss, gradients = loss_and_gradients(make("xla", jnp.float32))
    errors = {}
    for implementation, attention in (("xla", "xla"), ("cuda", "xla"), ("cuda", "cudnn")):
        got, found = loss_and_gradients(make(implementation, jnp.bfloat16, attention))
        assert abs(float(got) - float(loss)) <= 2e-3 * float(loss)
        pairs = zip(jax.tree.leaves(found), jax.tree.leaves(gradients), strict=True)
        errors[implementation, attention] = [relative(a, b) for a, b in pairs]
    # What bfloat16 costs is read off plain JAX in it.
    for key, found in errors.items():
        for error, by_plain in zip(found, errors["xla", "xla"], strict=True):
            assert error <= max(2 * by_plain, 1e-2), key


def test_prefill_in_pieces_and_decode_is_one_call():
    model = make("cuda", jnp.bfloat16)
    tokens = TOKENS[:1, :100]
    whole = jax.jit(lambda model: model(tokens))(model)
    run = jax.jit(lambda model, tokens, cache: model(tokens, cache=cache))
    cache, parts = model.init_cache(1, 100), []
    for piece in jnp.split(tokens, [37, 38, 96, 97, 98, 99], axis=1):
        logits, cache = run(model, piece, cache)
        parts.append(logits)
    assert relative(jnp.concatenate(parts, axis=1), whole) <= 2e-2
