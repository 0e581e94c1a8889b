"""Continuations of prompts: prefill, then tokens one after the other, greedy or sampled."""

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxqla._checks import message
from jaxqla.flax import HybridCache
from jaxqla.models.qwen import QwenForCausalLM


class _Sampling(NamedTuple):
    """The static side of a generation."""

    temperature: float
    top_k: int | None
    top_p: float | None
    stop: tuple[int, ...]
    pad: int


def generate(model: QwenForCausalLM, tokens: Int[Array, "B T"], **options: Any) -> Int[np.ndarray, "B new"]:
    """Continues prompts.

    Args:
        model: The model.
        tokens: Prompts, int32.
        **options: Those of `stream`.

    Returns:
        The new tokens, `[B, max_new_tokens]`: fewer where every row has stopped, and `pad_token_id` after the token
        that stopped a row.

    Raises:
        ValueError: As `stream` does.
    """
    return np.concatenate(list(stream(model, tokens, **options)), axis=1)


def stream(
    model: QwenForCausalLM,
    tokens: Int[Array, "B T"],
    *,
    max_new_tokens: int,
    segment_ids: Int[Array, "B T"] | None = None,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    key: jax.Array | None = None,
    eos_token_id: int | Sequence[int] | None = None,
    pad_token_id: int = 0,
    tokens_at_a_time: int = 16,
) -> Iterator[Int[np.ndarray, "B n"]]:
    """Continues prompts and hands out new tokens as they come.

    Args:
        model: The model.
        tokens: Prompts, int32, at least one token each.
        max_new_tokens: How many tokens to add, at least 1.
        segment_ids: Int32; 0 is padding, on any side. Prompts of several lengths need it; a mask of zeros and ones is a
            legal value.
        temperature: 0 takes the most likely token; above, tokens are drawn from `softmax(logits / temperature)`.
        top_k: Draws among so many of the most likely tokens only.
        top_p: Draws among the most likely tokens that reach this probability together, in (0, 1].
        key: A key of `jax.random`, needed to draw.
        eos_token_id: The token, or tokens, that end a row.
        pad_token_id: What a row that has ended gets.
        tokens_at_a_time: How many tokens of each row, after the first, are made before they are handed out.

    Yields:
        `[B, 1]` int32, the first tokens, as soon as the prompts are read; then `[B, n]`, `n` at most
        `tokens_at_a_time`. The last when `max_new_tokens` are there or all rows have ended.

    Raises:
        ValueError: An option is out of its range, or there is no key to draw with.
    """
    tokens = jnp.asarray(tokens)
    _check(tokens, max_new_tokens, temperature, top_k, top_p, key, tokens_at_a_time)
    stop = () if eos_token_id is None else tuple(np.atleast_1d(np.asarray(eos_token_id)).tolist())
    sampling = _Sampling(float(temperature), top_k, top_p, stop, pad_token_id)
    B, T = tokens.shape
    # Pieces of one length, which is one program to compile; what the last has too much is cut off.
    left = max_new_tokens - 1
    pieces = -(-left // tokens_at_a_time)
    steps = -(-left // max(pieces, 1))
    cache = _new_cache(model, B, T + pieces * steps)
    logits, cache = _prefill(model, tokens, segment_ids, cache)
    done, key = jnp.zeros(B, bool), jax.random.key(0) if key is None else key
    token, done, key = _first(logits, done, key, sampling)
    yield np.asarray(token)[:, None]
    while left > 0 and not np.asarray(done).all():
        new, token, cache, done, key = _decode(model, token, cache, done, key, steps=steps, sampling=sampling)
        yield np.asarray(new)[:, :left]
        left -= steps


def _check(tokens, max_new_tokens, temperature, top_k, top_p, key, tokens_at_a_time) -> None:
    if tokens.ndim != 2 or 0 in tokens.shape:
        rule = "have shape (B, T) with at least one row and one token"
        raise ValueError(message("generate", "tokens", rule, tokens.shape))
    for name, value in (("max_new_tokens", max_new_tokens), ("tokens_at_a_time", tokens_at_a_time)):
        if value < 1:
            raise ValueError(message("generate", name, "be at least 1", value))
    if not temperature >= 0:
        raise ValueError(message("generate", "temperature", "be at least 0", temperature))
    if temperature > 0 and key is None:
        raise ValueError(message("generate", "key", f"be given for temperature {temperature}", "None"))
    if top_k is not None and top_k < 1:
        raise ValueError(message("generate", "top_k", "be at least 1", top_k))
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(message("generate", "top_p", "be above 0 and at most 1", top_p))


@functools.partial(jax.jit, static_argnums=(1, 2))
def _new_cache(model: QwenForCausalLM, batch: int, length: int) -> HybridCache:
    return model.init_cache(batch, length)


@functools.partial(jax.jit, donate_argnums=3)
def _prefill(
    model: QwenForCausalLM, tokens: Array, segment_ids: Array | None, cache: HybridCache
) -> tuple[Float[Array, "B vocab"], HybridCache]:
    """Logits after the last token of each row."""
    hidden, after = model.hidden_states(tokens, segment_ids=segment_ids, cache=cache)
    assert after is not None
    last = hidden.shape[1] - 1
    if segment_ids is None:
        return model.logits(hidden[:, last]), after
    last = last - jnp.argmax(segment_ids[:, ::-1] != 0, axis=1)
    return model.logits(jnp.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0]), after


@functools.partial(jax.jit, static_argnames=("steps", "sampling"), donate_argnums=2)
def _decode(
    model: QwenForCausalLM,
    token: Int[Array, " B"],
    cache: HybridCache,
    done: Bool[Array, " B"],
    key: jax.Array,
    *,
    steps: int,
    sampling: _Sampling,
) -> tuple[Int[Array, "B steps"], Array, HybridCache, Array, jax.Array]:
    def step(carry: Any, _: None) -> tuple[Any, Array]:
        token, cache, done, key = carry
        logits, cache = model(token[:, None], cache=cache)
        token, done, key = _next(logits[:, 0], done, key, sampling)
        return (token, cache, done, key), token

    (token, cache, done, key), tokens = lax.scan(step, (token, cache, done, key), None, length=steps)
    return tokens.T, token, cache, done, key


def _next(
    logits: Float[Array, "B vocab"], done: Bool[Array, " B"], key: jax.Array, sampling: _Sampling
) -> tuple[Int[Array, " B"], Array, jax.Array]:
    """The next token of each row, which rows have ended with it, and the key for the tokens after."""
    key, draw = jax.random.split(key)
    token = jnp.where(done, sampling.pad, _choose(logits, draw, sampling)).astype(jnp.int32)
    for end in sampling.stop:
        done |= token == end
    return token, done, key


_first = jax.jit(_next, static_argnums=3)


def _choose(logits: Float[Array, "B vocab"], key: jax.Array, sampling: _Sampling) -> Int[Array, " B"]:
    if sampling.temperature == 0:
        return jnp.argmax(logits, axis=-1)
    logits = logits / sampling.temperature
    if sampling.top_k is not None:
        least = lax.top_k(logits, min(sampling.top_k, logits.shape[-1]))[0][:, -1:]
        logits = jnp.where(logits < least, -jnp.inf, logits)
    if sampling.top_p is not None:
        ordered = jnp.sort(logits, axis=-1)[:, ::-1]
        probabilities = jax.nn.softmax(ordered, axis=-1)
        # A token stays if those before it do not reach top_p; the first always does.
        kept = jnp.cumsum(probabilities, axis=-1) - probabilities < sampling.top_p
        least = jnp.min(jnp.where(kept, ordered, jnp.inf), axis=-1, keepdims=True)
        logits = jnp.where(logits < least, -jnp.inf, logits)
    return jax.random.categorical(key, logits, axis=-1)
