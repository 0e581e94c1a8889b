"""Continues prompts with a model of a local Hugging Face folder, and says how fast it read and wrote.

    python examples/generate.py Qwen3.5-0.8B "The capital of France is" "1, 1, 2, 3, 5," --max-new-tokens 64
    python examples/generate.py run/model "the first prompt" --temperature 0.8 --top-k 40 --top-p 0.95 --seed 1
    python examples/generate.py run/model --ids "5 6 7" "8 9"        # prompts as numbers of tokens

Prompts of several lengths go together, padded on the left. Text goes through the folder's `tokenizer.json`; without one
it is UTF-8 bytes, as `train.py` writes them. Needs the `models` extra.
"""

import argparse
import itertools
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxqla.flax import make_mesh, use_mesh
from jaxqla.models import QwenForCausalLM, load, stream


@dataclass
class Codec:
    """Between text and tokens: `encode` raises ValueError where it cannot."""

    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]


def ids_codec() -> Codec:
    """Tokens as numbers with blanks between them."""
    return Codec(lambda text: [int(x) for x in text.replace(",", " ").split()], lambda ids: " ".join(map(str, ids)))


def bytes_codec() -> Codec:
    """UTF-8; a token that is no byte is shown as its number."""

    def decode(ids: list[int]) -> str:
        known = b"".join(bytes([i]) if i < 256 else f"<{i}>".encode() for i in ids)
        return known.decode(errors="replace")

    return Codec(lambda text: list(text.encode()), decode)


def codec_of(folder: Path, vocab_size: int, *, ids: bool) -> Codec:
    """The codec of a folder's model."""
    if ids:
        return ids_codec()
    file = folder / "tokenizer.json"
    if file.is_file():
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(file))
        return Codec(lambda text: tokenizer.encode(text).ids, tokenizer.decode)
    if vocab_size < 256:
        got = f"a vocabulary of {vocab_size} and no {file}"
        raise ValueError(
            f"generate: the folder must have a tokenizer.json or a token for each byte, got {got}; see --ids"
        )
    return bytes_codec()


def encode(codec: Codec, prompts: Sequence[str], vocab_size: int) -> list[list[int]]:
    """The tokens of each prompt."""
    rows = []
    for prompt in prompts:
        try:
            row = codec.encode(prompt)
        except ValueError:
            raise ValueError(f"generate: prompts must be numbers with --ids, got {prompt!r}") from None
        if not row:
            raise ValueError(f"generate: prompts must have at least one token, got {prompt!r}")
        if not (min(row) >= 0 and max(row) < vocab_size):
            got = f"{min(row)} to {max(row)} in {prompt!r}"
            raise ValueError(f"generate: tokens must be at least 0 and below {vocab_size}, got {got}")
        rows.append(row)
    return rows


def pad_left(rows: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and segment ids (0 for padding), `[B, T]` int32, of rows of several lengths."""
    length = max(map(len, rows))
    tokens = np.zeros((len(rows), length), np.int32)
    segment_ids = np.zeros_like(tokens)
    for i, row in enumerate(rows):
        tokens[i, length - len(row) :] = row
        segment_ids[i, length - len(row) :] = 1
    return tokens, segment_ids


def end_tokens(folder: Path) -> list[int]:
    """What ends a text, from `generation_config.json` or `config.json`; empty where neither says."""
    for name in ("generation_config.json", "config.json"):
        file = folder / name
        fields = json.loads(file.read_text()) if file.is_file() else {}
        for level in (fields, fields.get("text_config", {})):
            if (ends := level.get("eos_token_id")) is not None:
                return [ends] if isinstance(ends, int) else list(ends)
    return []


class Screen:
    """Shows rows as they grow: one as running text, several as a line each, of which the end is seen."""

    def __init__(self, prompts: Sequence[str], blank: str):
        self.prompts, self.blank = prompts, blank
        self.live = sys.stdout.isatty()
        self.shown: list[str] = []

    def update(self, texts: list[str]) -> None:
        """Shows what has come."""
        if len(texts) == 1:
            self._go_on(texts[0].rstrip("\ufffd"))
        elif self.live:
            width = shutil.get_terminal_size().columns - 8
            up = f"\033[{len(texts)}F" if self.shown else ""
            lines = [f"\033[K[{i}] {' '.join(text.split())[-width:]}" for i, text in enumerate(texts, 1)]
            print(up + "\n".join(lines), flush=True)
            self.shown = texts

    def _go_on(self, text: str) -> None:
        # A character of several tokens may be there in part; the next piece then changes what has been decoded.
        if not self.shown:
            print(self.prompts[0] + self.blank, end="")
            self.shown = [""]
        if text.startswith(self.shown[0]):
            print(text[len(self.shown[0]) :], end="", flush=True)
            self.shown = [text]

    def finish(self, texts: list[str]) -> None:
        """Shows the whole of it."""
        if len(texts) == 1:
            self._go_on(texts[0])
            print()
        else:
            for i, (prompt, text) in enumerate(zip(self.prompts, texts, strict=True), 1):
                print(f"[{i}] {prompt}{self.blank}{text}")


def until_end(ids: np.ndarray, ends: Sequence[int]) -> list[int]:
    """A row up to the token that ended it, which is left out."""
    at = np.flatnonzero(np.isin(ids, ends))
    return ids[: at[0] if at.size else None].tolist()


def pieces(
    model: QwenForCausalLM,
    tokens: np.ndarray,
    segment_ids: np.ndarray,
    ends: Sequence[int],
    args: argparse.Namespace,
) -> Iterator[np.ndarray]:
    """New tokens of all rows, `[B, n]` int32, as they come."""
    return stream(
        model,
        jnp.asarray(tokens),
        segment_ids=None if segment_ids.all() else jnp.asarray(segment_ids),
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        key=jax.random.key(args.seed),
        eos_token_id=ends or None,
    )


def run(new_tokens: Iterator[np.ndarray], show: Callable[[np.ndarray], None]) -> tuple[np.ndarray, float, float]:
    """Takes what `stream` makes, and calls `show` with all new tokens so far whenever there are more.

    Returns:
        The new tokens `[B, new]`, the seconds until the first of them, and the seconds that the others took.
    """
    begin = time.perf_counter()
    new = [next(new_tokens)]
    prefill = time.perf_counter() - begin
    show(new[0])
    for piece in new_tokens:
        new.append(piece)
        show(np.concatenate(new, axis=1))
    return np.concatenate(new, axis=1), prefill, time.perf_counter() - begin - prefill


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path, help="config.json and safetensors, and a tokenizer.json if it has one")
    parser.add_argument("prompts", nargs="*", help="one row each; without any, the lines of the standard input")
    parser.add_argument("--ids", action="store_true", help="prompts are numbers of tokens; so is what is printed")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="most new tokens a row (default 64)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0, the default, takes the likeliest token")
    parser.add_argument("--top-k", type=int, help="draw among so many of the likeliest tokens")
    parser.add_argument("--top-p", type=float, help="draw among the likeliest tokens of this probability together")
    parser.add_argument("--seed", type=int, default=0, help="of the draws (default 0)")
    parser.add_argument("--no-stop", action="store_true", help="go on after the token that ends a text")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="of the computation; default: of the file")
    parser.add_argument("--tensor", type=int, default=1, help="devices to spread heads and widths over (default 1)")
    # Prompts may also come after options.
    return parser.parse_intermixed_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Loads, generates, prints."""
    args = parse(arguments)
    prompts = args.prompts or [line for line in sys.stdin.read().splitlines() if line.strip()]
    if not prompts:
        raise SystemExit("generate: prompts must be arguments or lines of the standard input, got none")
    try:
        mesh = make_mesh(tensor=args.tensor)
        model, report = load(args.folder, mesh=mesh, dtype=args.dtype)
        config = model.config
        codec = codec_of(args.folder, config.vocab_size, ids=args.ids)
        rows = encode(codec, prompts, config.vocab_size)
    except (FileNotFoundError, ValueError) as error:
        raise SystemExit(str(error)) from error
    ends = [] if args.no_stop else end_tokens(args.folder)
    batch = pad_left(rows)

    def texts(new: np.ndarray) -> list[str]:
        return [codec.decode(until_end(row, ends)) for row in new]

    kind = jax.devices()[0].device_kind
    print(f"{args.folder}: {config.num_parameters():,} parameters; {report}; on {args.tensor} x {kind}")
    with use_mesh(mesh, sizes=config.axis_sizes()):
        begin = time.perf_counter()
        try:
            # The first pieces of a run compile all of it; the second run is shown and timed.
            list(itertools.islice(pieces(model, *batch, ends, args), 2))
        except ValueError as error:
            raise SystemExit(str(error)) from error
        compiling = time.perf_counter() - begin
        screen = Screen(prompts, " " if args.ids else "")
        new, prefill, decode = run(pieces(model, *batch, ends, args), lambda new: screen.update(texts(new)))
    screen.finish(texts(new))
    count, steps = sum(map(len, rows)), new.shape[1] - 1
    print(f"prefill: {count} tokens of {len(rows)} prompts in {prefill:.3f} s, {count / prefill:,.0f} tokens/s")
    if steps:
        speed = f"{len(rows) * steps / decode:,.0f} tokens/s, {decode / steps * 1e3:.2f} ms a step"
        print(f"decode:  {len(rows) * steps} tokens in {decode:.3f} s, {speed}")
    print(f"(before that, compiling: {compiling:.1f} s)")


if __name__ == "__main__":
    main()
