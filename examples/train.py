"""Trains a Qwen hybrid model on packed rows, on any mesh, and goes on exactly where it was stopped.

    python examples/train.py --out run                                  # a tiny model on synthetic documents
    python examples/train.py --out run --text a.txt b.txt --steps 500   # bytes of files, a document a paragraph
    python examples/train.py --out run --preset qwen3.5-0.8b --fsdp 8 --length 8192 --dtype bfloat16

The same command again goes on from the newest whole checkpoint in `--out`. Needs the `examples` extra.
"""

import argparse
import json
import resource
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import grain
import grain.experimental
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from tqdm import tqdm

from jaxqla.flax import make_mesh, use_mesh
from jaxqla.models import QwenConfig, QwenForCausalLM, load, next_token_loss, save

GDN, ATTENTION = "linear_attention", "full_attention"
# Dense bf16 peak of a device in TFLOP/s, from the vendor's data sheets.
PEAK_TFLOPS = {"H100": 989.0, "H200": 989.0, "A100": 312.0}
# Not weights of a product: decaying them would only pull gates and norms to where they mean nothing.
NO_DECAY = ("A_log", "dt_bias", "scale")


def tiny_config() -> QwenConfig:
    """A hybrid of three gated delta layers and one of attention over bytes, for a CPU."""
    return QwenConfig(
        model_type="qwen3_5_text",
        vocab_size=256,
        hidden_size=64,
        intermediate_size=192,
        layer_types=(GDN, GDN, GDN, ATTENTION),
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        tie_word_embeddings=True,
    )


class Patterns:
    """Synthetic documents: a random pattern of 4 to 16 tokens, repeated; document `i` is always the same."""

    def __init__(self, vocab_size: int, length: int, seed: int):
        self.vocab_size, self.length, self.seed = vocab_size, length, seed

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, i: Any) -> dict[str, np.ndarray]:
        rng = np.random.default_rng((self.seed, int(i)))
        pattern = rng.integers(1, self.vocab_size, rng.integers(4, 17))
        size = rng.integers(min(16, self.length), self.length + 1)
        return {"tokens": np.resize(pattern, size).astype(np.int32)}


class Paragraphs:
    """Documents of text files: their paragraphs, as UTF-8 bytes or through a tokenizer, cut at the row's length."""

    def __init__(self, files: list[Path], length: int, tokenizer: Path | None, vocab_size: int):
        text = "\n\n".join(file.read_text() for file in files)
        if tokenizer is None:
            tokens = [list((part + "\n").encode()) for part in text.split("\n\n") if part.strip()]
        else:
            from tokenizers import Tokenizer

            try:
                encode = Tokenizer.from_file(str(tokenizer)).encode
            except Exception as error:  # the library has no other kind
                raise ValueError(f"train: --tokenizer must be a tokenizer.json, got {tokenizer}: {error}") from error
            tokens = [encode(part + "\n").ids for part in text.split("\n\n") if part.strip()]
        self.documents = [
            np.asarray(part[i : i + length], np.int32) for part in tokens for i in range(0, len(part), length)
        ]
        if not self.documents:
            raise ValueError(
                f"train: --text must have at least one paragraph, got none in {', '.join(map(str, files))}"
            )
        if (most := max(int(part.max()) for part in self.documents)) >= vocab_size:
            of = f"of {tokenizer}" if tokenizer else "that are bytes"
            raise ValueError(f"train: tokens {of} must be below the model's vocabulary of {vocab_size}, got {most}")

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, i: Any) -> dict[str, np.ndarray]:
        return {"tokens": self.documents[int(i)]}


def batches(source: Any, batch: int, length: int, seed: int) -> grain.IterDataset:
    """Endless shuffled rows of packed documents: tokens, segment ids (0 is padding) and positions, each `[B, T]`."""
    documents = grain.MapDataset.source(source).seed(seed).shuffle().repeat(None).to_iter_dataset()
    packed = grain.experimental.FirstFitPackIterDataset(
        documents, length_struct={"tokens": length}, num_packing_bins=batch, shuffle_bins=False
    )
    return packed.batch(batch)


def is_decayed(name: str) -> bool:
    """Whether weight decay is for this parameter: for all but gates' biases, decay rates, norms, and an unused head."""
    # Nothing of this loss goes through the head of multi-token prediction, which is to stay as it was loaded.
    return name.rsplit(".", 1)[-1] not in NO_DECAY and not name.startswith("mtp.")


def make_optimizer(rate: optax.Schedule, weight_decay: float) -> optax.GradientTransformation:
    """AdamW behind a clipped global norm, over parameters by name."""

    def decayed(params: Any) -> dict[str, bool]:
        return {name: is_decayed(name) for name in params}

    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(rate, b1=0.9, b2=0.95, weight_decay=weight_decay, mask=decayed),
    )


class Parameters:
    """The parameters of a model as a flat dictionary of arrays by name, and the model of such a dictionary."""

    def __init__(self, model: QwenForCausalLM):
        self.graph, state = nnx.split(model)
        self.variables = {".".join(map(str, path)): (path, x) for path, x in nnx.to_flat_state(state)}

    def arrays(self) -> dict[str, jax.Array]:
        """The arrays of the model that this was made from."""
        return {name: x[...] for name, (_, x) in self.variables.items()}

    def model(self, arrays: dict[str, jax.Array]) -> QwenForCausalLM:
        """The model with these arrays."""
        flat = [(path, x.replace(arrays[name])) for name, (path, x) in self.variables.items()]
        return nnx.merge(self.graph, nnx.from_flat_state(flat))


def flops(config: QwenConfig, positions: np.ndarray, segment_ids: np.ndarray) -> float:
    """Operations of a training step on these tokens, backward twice the forward; padding and recomputation count 0."""
    tokens = int(np.count_nonzero(segment_ids))
    pairs = int(np.sum(np.where(segment_ids, positions + 1, 0)))
    return 3 * config.num_flops(tokens, pairs)


def memory_gb() -> float:
    """The most memory so far: of the first device, or of the process where the device does not say."""
    stats = jax.local_devices()[0].memory_stats()
    if stats and "peak_bytes_in_use" in stats:
        return stats["peak_bytes_in_use"] / 1e9
    # Kilobytes on Linux, bytes on macOS.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e9


def peak_flops(tflops: float | None) -> float | None:
    """Peak of all devices in use, or None where it is not known."""
    kind = jax.devices()[0].device_kind
    known = next((peak for name, peak in PEAK_TFLOPS.items() if name in kind), None)
    return None if (tflops or known) is None else (tflops or known or 0) * 1e12


def plot(lines: list[dict[str, float]], path: Path) -> None:
    """Draws the loss over steps."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(6, 4))
    axis.plot([line["step"] for line in lines], [line["loss"] for line in lines])
    axis.set(xlabel="step", ylabel="loss (nats a token)")
    axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of checkpoints, metrics.jsonl and loss.png")
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--preset", help="a published size; default: a tiny model")
    model.add_argument("--load", type=Path, help="start from the weights of a Hugging Face folder")
    parser.add_argument("--text", type=Path, nargs="+", help="text files; default: synthetic documents")
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json for --text; default: that of --load, or bytes")
    for name, default in {"steps": 200, "batch": 8, "length": 256, "warmup": 20, "save-every": 50, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    for name in ("data", "fsdp", "tensor"):
        parser.add_argument(f"--{name}", type=int, default=1, help="size of this axis of the mesh (default 1)")
    parser.add_argument("--rate", type=float, default=3e-3, help="highest learning rate (default 3e-3)")
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the computation")
    parser.add_argument("--remat", action="store_true", help="compute layers again in the backward")
    parser.add_argument("--peak-tflops", type=float, help="of a device, for MFU; known for A100, H100, H200")
    parser.add_argument("--tensorboard", action="store_true", help="write event files into --out as well")
    args = parser.parse_args(arguments)
    for name in ("steps", "batch", "length", "save_every", "data", "fsdp", "tensor"):
        least = 2 if name == "length" else 1
        if getattr(args, name) < least:
            parser.error(f"--{name.replace('_', '-')} must be at least {least}, got {getattr(args, name)}")
    if args.warmup < 0:
        parser.error(f"--warmup must be at least 0, got {args.warmup}")
    if args.batch % (args.data * args.fsdp):
        parser.error(f"--batch must be a multiple of --data x --fsdp = {args.data * args.fsdp}, got {args.batch}")
    if args.tokenizer and not args.text:
        parser.error("--tokenizer must come with --text, got it alone")
    if args.text and args.load and not args.tokenizer and (args.load / "tokenizer.json").is_file():
        args.tokenizer = args.load / "tokenizer.json"
    for file in (*(args.text or ()), *filter(None, [args.tokenizer])):
        if not file.is_file():
            parser.error(f"--text and --tokenizer must be files, got {file}")
    return args


def check_is_same_run(args: argparse.Namespace, saved: bool) -> None:
    """Keeps the arguments that a run cannot go on without in `--out`, and compares them where something is saved.

    Raises:
        ValueError: They are others than those of what is saved.
    """
    file = args.out / "arguments.json"
    names = ("preset", "load", "text", "tokenizer", "batch", "length", "seed")
    now = {name: json.loads(json.dumps(getattr(args, name), default=str)) for name in names}
    then = json.loads(file.read_text()) if saved and file.is_file() else now
    different = [f"--{name} {now[name]} instead of {then[name]}" for name in names if now[name] != then[name]]
    if different:
        rule = "be those of the run that is saved there, or --out another folder"
        raise ValueError(f"train: arguments must {rule}, got {', '.join(different)}")
    file.write_text(json.dumps(now, indent=2) + "\n")


def new_model(args: argparse.Namespace, mesh: jax.sharding.Mesh) -> QwenForCausalLM:
    """The model of the command line, its parameters on the mesh."""
    if args.load:
        options = {"scan_layers": True, "remat": args.remat}
        return load(args.load, mesh=mesh, dtype=args.dtype, param_dtype=jnp.float32, **options)[0]
    config = QwenConfig.preset(args.preset) if args.preset else tiny_config()
    with use_mesh(mesh, sizes=config.axis_sizes()):
        return QwenForCausalLM(
            config, dtype=args.dtype, scan_layers=True, remat=args.remat, rngs=nnx.Rngs(params=args.seed)
        )


def prepare(args: argparse.Namespace) -> tuple[jax.sharding.Mesh, QwenForCausalLM, Any]:
    """The mesh, the model and the documents.

    Raises:
        ValueError: The command line asks for what cannot be.
        FileNotFoundError: The folder to load is none.
    """
    args.out.mkdir(parents=True, exist_ok=True)
    checkpoints = args.out / "checkpoints"
    check_is_same_run(args, checkpoints.is_dir() and any(path.name.isdigit() for path in checkpoints.iterdir()))
    mesh = make_mesh(data=args.data, fsdp=args.fsdp, tensor=args.tensor)
    model = new_model(args, mesh)
    if args.text:
        return mesh, model, Paragraphs(args.text, args.length, args.tokenizer, model.config.vocab_size)
    return mesh, model, Patterns(model.config.vocab_size, args.length, args.seed)


def main(arguments: list[str] | None = None) -> None:
    """Trains, saves, plots."""
    args = parse(arguments)
    try:
        mesh, model, source = prepare(args)
    except (FileNotFoundError, ValueError) as error:
        raise SystemExit(str(error)) from error
    config, parameters = model.config, Parameters(model)
    params = parameters.arrays()
    del model
    rate = optax.warmup_cosine_decay_schedule(
        0.0, args.rate, args.warmup, max(args.steps, args.warmup + 1), args.rate / 10
    )
    optimizer = make_optimizer(rate, args.weight_decay)
    iterator = iter(batches(source, args.batch, args.length, args.seed))

    def step(params: dict[str, jax.Array], moments: Any, batch: dict[str, jax.Array]) -> Any:
        def loss(params: dict[str, jax.Array]) -> Any:
            return next_token_loss(parameters.model(params), batch["tokens"], segment_ids=batch["tokens_segment_ids"])

        (value, _), grads = jax.value_and_grad(loss, has_aux=True)(params)
        updates, moments = optimizer.update(grads, moments, params)
        return optax.apply_updates(params, updates), moments, value

    with use_mesh(mesh, sizes=config.axis_sizes()):
        moments = optimizer.init(params)
        # Counters and other arrays of the optimizer that follow no parameter are on all devices.
        everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        moments = jax.tree.map(lambda x: x if x.ndim else jax.device_put(x, everywhere), moments)
        options = ocp.CheckpointManagerOptions(max_to_keep=2, save_interval_steps=1)
        metrics = args.out / "metrics.jsonl"
        with ocp.CheckpointManager((args.out / "checkpoints").absolute(), options=options) as manager:
            start = manager.latest_step() or 0
            if start:
                abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, {"params": params, "moments": moments})
                restored = manager.restore(
                    start,
                    args=ocp.args.Composite(state=ocp.args.StandardRestore(abstract), data=ocp.args.JsonRestore()),
                )
                params, moments = restored["state"]["params"], restored["state"]["moments"]
                iterator.set_state(restored["data"]["iterator"])
                print(f"going on from step {start}")
            # A run that was killed may have logged steps that it did not save.
            old = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
            lines = [line for line in old if line["step"] <= start]
            rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(("data", "fsdp")))
            run = jax.jit(step, donate_argnums=(0, 1))
            writer = None
            if args.tensorboard:
                from tensorboardX import SummaryWriter

                writer = SummaryWriter(str(args.out))
            peak = peak_flops(args.peak_tflops)
            with metrics.open("w") as log, tqdm(total=args.steps, initial=start, dynamic_ncols=True) as bar:
                log.writelines(json.dumps(line) + "\n" for line in lines)
                for i in range(start + 1, args.steps + 1):
                    begin = time.perf_counter()
                    batch = next(iterator)
                    params, moments, loss = run(params, moments, jax.device_put(batch, rows))
                    loss = float(loss)
                    seconds = time.perf_counter() - begin
                    ids = batch["tokens_segment_ids"]
                    line = {
                        "step": i,
                        "loss": loss,
                        "rate": float(jnp.asarray(rate(i - 1))),
                        "tokens_per_second": float(np.count_nonzero(ids) / seconds),
                        "memory_gb": memory_gb(),
                    }
                    if peak:
                        work = flops(config, batch["tokens_positions"], ids)
                        line["mfu"] = work / seconds / (peak * mesh.size)
                    lines.append(line)
                    log.write(json.dumps(line) + "\n")
                    log.flush()
                    shown = {"loss": f"{loss:.4f}", "lr": f"{line['rate']:.1e}"}
                    shown["tokens/s"] = f"{line['tokens_per_second']:,.0f}"
                    shown["MFU"] = f"{line['mfu']:.1%}" if peak else "-"
                    shown["GB"] = f"{line['memory_gb']:.1f}"
                    bar.set_postfix(shown, refresh=False)
                    bar.update()
                    if writer:
                        for name, value in line.items():
                            writer.add_scalar(name, value, i)
                    if i % args.save_every == 0 or i == args.steps:
                        state = ocp.args.StandardSave({"params": params, "moments": moments})
                        data = ocp.args.JsonSave({"iterator": iterator.get_state()})
                        manager.save(i, args=ocp.args.Composite(state=state, data=data))
            if writer:
                writer.close()
        save(parameters.model(params), args.out / "model")
    if args.tokenizer:
        shutil.copy2(args.tokenizer, args.out / "model" / "tokenizer.json")
    if lines:
        plot(lines, args.out / "loss.png")
    print(f"{args.out}: checkpoints, model (Hugging Face layout), metrics.jsonl, loss.png")


if __name__ == "__main__":
    main()
