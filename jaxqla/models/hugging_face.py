"""Weights from and to folders of safetensors as Hugging Face writes them."""

import json
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, Sharding
from jax.typing import DTypeLike
from safetensors.numpy import save_file

from jaxqla._checks import message
from jaxqla.flax import use_mesh
from jaxqla.models._checkpoint import Files, Naming, Source, is_float32, source_of
from jaxqla.models.config import QwenConfig
from jaxqla.models.qwen import QwenForCausalLM

# Parts of a checkpoint that a text model has no use for.
_SKIPPED = ("model.visual.", "visual.", "mtp.")


@dataclass
class Report:
    """What became of the tensors of a checkpoint.

    Attributes:
        mapped: Names of tensors that were loaded.
        skipped: Names of tensors that this model has no use for: of a vision tower, of a multi-token-prediction head
            that the configuration does not have, and an output projection that is tied to the embedding.
        unknown: Names of all others; loading warns of them.
    """

    mapped: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{len(self.mapped)} tensors mapped, {len(self.skipped)} skipped, {len(self.unknown)} unknown"


def load(
    path: str | Path,
    *,
    mesh: Mesh | None = None,
    dtype: DTypeLike | None = None,
    param_dtype: DTypeLike | None = None,
    **options: Any,
) -> tuple[QwenForCausalLM, Report]:
    """Loads a model from a local folder with `config.json` and safetensors, one file or several with an index.

    Takes the layouts of Qwen3-Next and of Qwen3.5, experts fused or one by one, text checkpoints and those with a
    vision tower, whose tensors are skipped. Reads one parameter at a time, and of it what this process's devices hold.

    Args:
        path: The folder.
        mesh: Where the parameters go, by `jaxqla.flax.LOGICAL_RULES`. The default is the default device.
        dtype: Of the computation; None takes that of the parameters.
        param_dtype: Of the parameters; None keeps what the file has. `A_log`, `dt_bias` and the gated norms are
            float32.
        **options: Others of `QwenForCausalLM`, such as `scan_layers`.

    Returns:
        The model, and what became of the tensors.

    Raises:
        FileNotFoundError: The folder has no configuration, no safetensors, or not all that its index names.
        ValueError: The architecture is another; tensors are missing, of another shape or of a dtype that is no float of
            16 bits or more: the message names them.
    """
    config = QwenConfig.from_hf(path)
    with ExitStack() as stack:
        placed = stack.enter_context(use_mesh(mesh, sizes=config.axis_sizes())) if mesh is not None else None
        files = Files(stack, Path(path))

        def new_model() -> QwenForCausalLM:
            return QwenForCausalLM(
                config, dtype=dtype, param_dtype=param_dtype or jnp.float32, rngs=nnx.Rngs(0), **options
            )

        graph, state = nnx.split(nnx.eval_shape(new_model))
        variables = dict(nnx.to_flat_state(state))
        sources = {name: source_of(config, files.naming(), name) for name in variables}
        report = _check(config, files, {sources[name]: x.shape for name, x in variables.items()})
        shardings = {} if placed is None else dict(nnx.to_flat_state(nnx.get_named_sharding(state, placed)))
        loaded = []
        for name, variable in variables.items():
            keep = param_dtype is None and not is_float32(name)
            target = files.dtype(sources[name].names[0]) if keep else variable.dtype
            sharding = shardings[name].get_value() if name in shardings else None
            loaded.append((name, variable.replace(_array(files, sources[name], variable.shape, target, sharding))))
        return nnx.merge(graph, nnx.from_flat_state(loaded)), report


def save(model: QwenForCausalLM, path: str | Path) -> None:
    """Writes a model as a folder that Hugging Face's text model, and `load`, read.

    Args:
        model: Any. Its parameters are gathered on the host.
        path: The folder; made where it is not there. `config.json` and `model.safetensors` in it are replaced.
    """
    config, folder = model.config, Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    naming = Naming("model.", fused_experts=False, grouped_projections=config.is_next)
    tensors: dict[str, np.ndarray] = {}
    for name, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        tensors |= source_of(config, naming, name).write(np.asarray(jax.device_get(variable[...])))
    tensors = {name: np.ascontiguousarray(x) for name, x in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    dtype = model.embed_tokens.embedding.dtype.name
    (folder / "config.json").write_text(json.dumps({**config.to_hf(), "dtype": dtype}, indent=2) + "\n")


def _array(files: Files, source: Source, shape: tuple[int, ...], dtype: Any, sharding: Sharding | None) -> jax.Array:
    def part(index: Any) -> np.ndarray:
        whole = tuple(slice(*i.indices(n)[:2]) for i, n in zip(index, shape, strict=True))
        return source.read(files, whole).astype(dtype)

    if sharding is None:
        return jnp.asarray(part((slice(None),) * len(shape)))
    return jax.make_array_from_callback(shape, sharding, part)


def _check(config: QwenConfig, files: Files, sources: Mapping[Source, tuple[int, ...]]) -> Report:
    shapes: dict[str, tuple[int, ...]] = {}
    for source, shape in sources.items():
        shapes |= source.shapes(shape)
    if missing := [name for name in shapes if name not in files]:
        raise ValueError(message("load", "path", "have all tensors of the model", f"{len(missing)} missing: {missing}"))
    for name, shape in shapes.items():
        if files.shape(name) != shape:
            raise ValueError(message("load", name, f"have shape {shape}", files.shape(name)))
        files.dtype(name)
    report = Report(mapped=list(shapes))
    skipped = (*_SKIPPED, "lm_head.") if config.tie_word_embeddings else _SKIPPED
    for name in files:
        if name not in shapes:
            (report.skipped if name.startswith(skipped) else report.unknown).append(name)
    if report.unknown:
        rule = "have only tensors that the model knows"
        warnings.warn(message("load", "path", rule, f"{len(report.unknown)} others: {report.unknown}"), stacklevel=3)
    return report
