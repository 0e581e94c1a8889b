"""A tiny hybrid model learns this project's own documents in about a minute, then goes on from the start of a sentence.

Prints the loss before and after, on the text that it learns and on text that it never sees, and what the model makes of
a prompt before and after; fails where it has not learnt. Needs the `demo` extra.
"""

import re
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tqdm import tqdm

from jaxqla.models import QwenConfig, QwenForCausalLM, generate, next_token_loss

FILES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/design.md", "docs/sharding.md")
GDN, ATTENTION = "linear_attention", "full_attention"
PROMPT = "The state of a "
NEW = 200
BATCH, LENGTH = 8, 256
# Over after so many steps or seconds, on a slow machine after the fewest steps; the rate of learning follows.
STEPS, SECONDS, FEWEST = 500, 60.0, 80
# The highest rate of learning, for a model of this width; a wider one gets less.
RATE, WIDTH = 4e-3, 128
# What the loss must fall to, as a share of what it was, and how many of the words must be words of the documents.
MOST_LOSS, FEWEST_WORDS = 0.5, 0.5


class Text:
    """The documents as tokens: the bytes that occur in them, numbered. The last tenth is held out."""

    def __init__(self) -> None:
        root = Path(__file__).parent.parent
        data = np.frombuffer("\n\n".join((root / name).read_text() for name in FILES).encode(), np.uint8)
        self.bytes, tokens = np.unique(data, return_inverse=True)
        split = len(tokens) * 9 // 10
        self.learnt, self.held_out = tokens[:split].astype(np.int32), tokens[split:].astype(np.int32)
        self.words = set(re.findall(r"[a-z]{3,}", self.decode(self.learnt).lower()))

    def encode(self, text: str) -> np.ndarray:
        """Tokens of a text whose bytes all occur in the documents."""
        return np.searchsorted(self.bytes, np.frombuffer(text.encode(), np.uint8)).astype(np.int32)

    def decode(self, tokens: np.ndarray) -> str:
        """The text of tokens."""
        return self.bytes[tokens].tobytes().decode(errors="replace")

    def rows(self, seed: int) -> np.ndarray:
        """Rows from random places of the text to learn, `[BATCH, LENGTH]`."""
        starts = np.random.default_rng(seed).integers(0, len(self.learnt) - LENGTH, BATCH)
        return np.stack([self.learnt[start : start + LENGTH] for start in starts])

    def share_of_words(self, text: str) -> float:
        """How many of the words of a text, of three letters or more, are words of the documents."""
        words = re.findall(r"[a-z]{3,}", text.lower())
        return sum(word in self.words for word in words) / max(len(words), 1)


def new_model(vocab_size: int) -> QwenForCausalLM:
    """A model that a CPU trains in a minute; on a GPU a wider one, whose heads are those that the kernels take."""
    small = jax.default_backend() == "cpu"
    config = QwenConfig(
        model_type="qwen3_5_text",
        vocab_size=vocab_size,
        hidden_size=WIDTH if small else 2 * WIDTH,
        intermediate_size=2 * WIDTH if small else 4 * WIDTH,
        layer_types=(GDN, ATTENTION) if small else (GDN, GDN, GDN, ATTENTION),
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32 if small else 64,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=32 if small else 128,
        linear_value_head_dim=32 if small else 128,
        tie_word_embeddings=True,
    )
    return QwenForCausalLM(config, dtype=jnp.float32 if small else jnp.bfloat16, rngs=nnx.Rngs(0))


def share_over(steps: int, seconds: float) -> float:
    """How much of the training is over; at 1 it ends."""
    return min(1.0, max(steps / STEPS, min(seconds / SECONDS, steps / FEWEST)))


def check(start: float, end: float, words: float) -> None:
    """Fails where the model has not learnt."""
    if not end < MOST_LOSS * start:
        raise AssertionError(f"tiny_model: the loss must fall below {MOST_LOSS} of {start:.2f}, got {end:.2f}")
    if not words > FEWEST_WORDS:
        rule = f"more than {FEWEST_WORDS:.0%} of the words must be words of the documents"
        raise AssertionError(f"tiny_model: {rule}, got {words:.0%}")


def train(model: QwenForCausalLM, text: Text) -> tuple[QwenForCausalLM, list[float]]:
    """Trains until it is over; returns the model and the losses of all steps."""
    graph, params = nnx.split(model)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.scale_by_adam(b2=0.98))
    moments = optimizer.init(params)
    peak = RATE * WIDTH / model.config.hidden_size

    @jax.jit
    def step(params: Any, moments: Any, tokens: jax.Array, rate: float) -> Any:
        loss, grads = jax.value_and_grad(lambda params: next_token_loss(nnx.merge(graph, params), tokens)[0])(params)
        updates, moments = optimizer.update(grads, moments, params)
        return optax.apply_updates(params, jax.tree.map(lambda x: -rate * x, updates)), moments, loss

    losses: list[float] = []
    form = "    {desc} {percentage:3.0f}% |{bar:30}| {elapsed}{postfix}"
    with tqdm(total=100, desc="training: compiling", bar_format=form, leave=False) as bar:
        begin = time.perf_counter()
        while (over := share_over(len(losses), time.perf_counter() - begin)) < 1:
            rate = peak * min(1.0, (len(losses) + 1) / 20, 1.05 - over)
            params, moments, loss = step(params, moments, jnp.asarray(text.rows(len(losses))), rate)
            losses.append(float(loss))
            if len(losses) == 1:
                begin = time.perf_counter()  # the first step has compiled
                bar.set_description("training")
            bar.set_postfix_str(f"loss {losses[-1]:.3f}", refresh=False)
            bar.update(int(100 * over) - bar.n)
    return nnx.merge(graph, params), losses


def main() -> None:
    """Trains, and shows what has been learnt."""
    text = Text()
    model = new_model(len(text.bytes))
    layers = "".join("G" if kind == GDN else "A" for kind in model.config.layer_types)
    print(
        f"a hybrid model (layers {layers}: G gated delta, A attention) of {model.config.num_parameters():,} parameters"
        f" learns {len(text.learnt):,} bytes of this project's documents:"
    )
    size = len(text.held_out) // LENGTH * LENGTH
    held_out = jnp.asarray(text.held_out[:size].reshape(-1, LENGTH))
    evaluate = jax.jit(lambda model: next_token_loss(model, held_out)[0])
    prompt = jnp.asarray(text.encode(PROMPT))[None]

    def say(model: QwenForCausalLM) -> str:
        options = {"temperature": 0.5, "key": jax.random.key(0)}
        return text.decode(generate(model, prompt, max_new_tokens=NEW, **options)[0])

    before, words_before = float(evaluate(model)), text.share_of_words(say(model))
    begin = time.perf_counter()
    model, losses = train(model, text)
    seconds = time.perf_counter() - begin
    start, end = losses[0], float(np.mean(losses[-20:]))
    continuation = say(model)
    words = text.share_of_words(continuation)
    speed = len(losses) * BATCH * LENGTH / seconds
    print(f"    {len(losses)} steps in {seconds:.0f} s with compiling, {speed:,.0f} tokens/s")
    print(f"    loss (nats a byte)      {start:.2f} -> {end:.2f}")
    print(f"    of text never seen      {before:.2f} -> {float(evaluate(model)):.2f}")
    print(f"    words that are words    {words_before:.0%} -> {words:.0%}")
    for i, line in enumerate((PROMPT + continuation).splitlines()):
        print(f"    {'| ' if i else '> '}{line}")
    check(start, end, words)


if __name__ == "__main__":
    main()
