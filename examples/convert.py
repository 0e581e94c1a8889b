"""Converts a model between a Hugging Face folder and an orbax checkpoint, either way.

    python examples/convert.py Qwen3.5-0.8B qwen-orbax --check      # a source with safetensors: to orbax
    python examples/convert.py qwen-orbax Qwen-again --check        # a source with orbax's arrays: back
    python examples/convert.py Qwen3.5-0.8B wide --scan-layers --param-dtype float32

The orbax side is a folder with `config.json`, the tokenizer's files and `params`, a dictionary of arrays by the names
of the model's parameters, such as `layers.0.linear_attn.A_log`. `--check` reads the target again and compares every
parameter and the logits of a few tokens, to the bit. Needs the extras `models` and `examples`.
"""

import argparse
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx
from tqdm import tqdm

from jaxqla.models import QwenConfig, QwenForCausalLM, load, save

# What goes along with the weights, where it is there.
BESIDE = (
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
)
CHECKED_TOKENS = (2, 67)


def arrays_of(model: QwenForCausalLM) -> dict[str, jax.Array]:
    """The parameters by name."""
    return {".".join(map(str, path)): x[...] for path, x in nnx.to_flat_state(nnx.state(model, nnx.Param))}


def read_orbax(folder: Path) -> QwenForCausalLM:
    """The model of a folder that `write_orbax` wrote.

    Raises:
        FileNotFoundError: There is no `config.json` in it.
        ValueError: The parameters are not those of the configuration; the message names them.
    """
    config = QwenConfig.from_hf(folder)
    with ocp.StandardCheckpointer() as checkpointer:
        stored = checkpointer.metadata((folder / "params").absolute()).item_metadata
        stored = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in stored.items()}
        scanned = any(name.startswith("blocks.") for name in stored)
        graph, state = nnx.split(
            nnx.eval_shape(lambda: QwenForCausalLM(config, scan_layers=scanned, rngs=nnx.Rngs(params=0)))
        )
        variables = {".".join(map(str, path)): (path, x) for path, x in nnx.to_flat_state(state)}
        wanted = {name: x.shape for name, (_, x) in variables.items()}
        got = {name: x.shape for name, x in stored.items()}
        if wanted != got:
            different = sorted(name for name in wanted.keys() | got.keys() if wanted.get(name) != got.get(name))
            rule = "have the parameters of its config.json"
            raise ValueError(f"convert: {folder / 'params'} must {rule}, got others, or of other shapes: {different}")
        here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        abstract = {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here) for name, x in stored.items()}
        arrays = checkpointer.restore((folder / "params").absolute(), abstract)
    flat = [(path, x.replace(arrays[name])) for name, (path, x) in variables.items()]
    return nnx.merge(graph, nnx.from_flat_state(flat))


def write_orbax(model: QwenForCausalLM, folder: Path) -> None:
    """Writes `config.json` and `params`."""
    folder.mkdir(parents=True, exist_ok=True)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save((folder / "params").absolute(), arrays_of(model))
    (folder / "config.json").write_text(json.dumps(model.config.to_hf(), indent=2) + "\n")


def check(model: QwenForCausalLM, again: QwenForCausalLM) -> str:
    """Compares two models to the bit, and says what was compared.

    Raises:
        ValueError: They differ; the message names the parameters.
    """
    if again.config != model.config:
        raise ValueError(f"convert: the target must have the source's configuration, got {again.config}")
    expected, got = arrays_of(model), arrays_of(again)
    different = sorted(expected.keys() ^ got.keys())
    for name in tqdm(sorted(expected.keys() & got.keys()), desc="comparing", leave=False):
        x, y = np.asarray(expected[name]), np.asarray(got[name])
        if x.dtype != y.dtype or x.shape != y.shape or x.tobytes() != y.tobytes():
            different.append(name)
    if different:
        raise ValueError(f"convert: the target must have the source's parameters to the bit, got others: {different}")
    tokens = jax.random.randint(jax.random.key(0), CHECKED_TOKENS, 0, model.config.vocab_size)
    logits = jax.jit(lambda model: model(tokens))
    if not bool(jnp.array_equal(logits(model), logits(again))):
        raise ValueError("convert: the target must have the source's logits to the bit, got others")
    tokens = " x ".join(map(str, CHECKED_TOKENS))
    return f"{len(expected)} parameters and the logits of {tokens} tokens are equal to the bit"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("source", type=Path, help="a Hugging Face folder, or a folder that this wrote")
    parser.add_argument("target", type=Path, help="a folder, not there yet or empty")
    parser.add_argument("--check", action="store_true", help="read the target again and compare it to the bit")
    parser.add_argument(
        "--param-dtype", choices=("float32", "bfloat16"), help="to orbax: default is what the files have"
    )
    parser.add_argument(
        "--scan-layers", action="store_true", help="to orbax: layers of a kind stacked, for scan_layers"
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Converts, and checks where that is asked for."""
    args = parse(arguments)
    source, target = args.source, args.target
    options: dict[str, Any] = {"scan_layers": args.scan_layers}
    if args.param_dtype:
        options["param_dtype"] = jnp.dtype(args.param_dtype)
    try:
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise ValueError(f"convert: target must not be there yet, or be an empty folder, got {target}")
        to_orbax = not (source / "params").is_dir()
        if not to_orbax and (args.scan_layers or args.param_dtype):
            raise ValueError("convert: --scan-layers and --param-dtype must be left out on the way back, got them")
        if to_orbax:
            model, report = load(source, **options)
            print(f"{source}: {report}")
            write_orbax(model, target)
        else:
            model = read_orbax(source)
            save(model, target)
        for name in BESIDE:
            if (source / name).is_file():
                shutil.copy2(source / name, target / name)
        print(f"{target}: {model.config.num_parameters():,} parameters, {'orbax' if to_orbax else 'Hugging Face'}")
        if args.check and to_orbax:
            print(f"checked: {check(model, read_orbax(target))}")
        elif args.check:
            print(f"checked: {check(model, load(target, scan_layers=model.scan_layers)[0])}")
    except (FileNotFoundError, ValueError) as error:
        raise SystemExit(str(error)) from error


if __name__ == "__main__":
    main()
