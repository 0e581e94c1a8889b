"""The tensors of a checkpoint, and which of them each parameter of the model is made of.

Every parameter has a `Source`: the tensors that it is made of, and how. A source reads only the part that a shard
needs, and writes the same tensors back, bit for bit.
"""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax.numpy as jnp
import numpy as np
from safetensors import safe_open

from jaxqla._checks import message
from jaxqla.models.config import QwenConfig

_PREFIXES = ("model.language_model.", "model.")
_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
Index = tuple[slice, ...]


class Naming(NamedTuple):
    """What differs between checkpoints: the prefix of the text model, and the layouts of experts and projections."""

    prefix: str
    fused_experts: bool
    grouped_projections: bool


class Files:
    """The tensors of a folder by name, whatever file they are in."""

    def __init__(self, stack: ExitStack, folder: Path):
        index = folder / "model.safetensors.index.json"
        if index.is_file():
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        else:
            names = sorted(file.name for file in folder.glob("*.safetensors"))
        if not names:
            raise FileNotFoundError(message("load", "path", "have *.safetensors", folder))
        self._slices: dict[str, Any] = {}
        for name in names:
            if not (folder / name).is_file():
                raise FileNotFoundError(message("load", "path", "have the files of its index", folder / name))
            file = stack.enter_context(safe_open(folder / name, "np"))
            self._slices |= {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118

    def __iter__(self) -> Iterator[str]:
        return iter(self._slices)

    def __contains__(self, name: str) -> bool:
        return name in self._slices

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slices[name].get_shape())

    def dtype(self, name: str) -> Any:
        kind = self._slices[name].get_dtype()
        if kind not in _DTYPES:
            rule = f"have a dtype of {', '.join(_DTYPES)}; load the unquantised checkpoint"
            raise ValueError(message("load", name, rule, kind))
        return jnp.dtype(_DTYPES[kind])

    def read(self, name: str, *index: slice) -> np.ndarray:
        return self._slices[name][index]

    def naming(self) -> Naming:
        return Naming(
            next((prefix for prefix in _PREFIXES if f"{prefix}embed_tokens.weight" in self), _PREFIXES[-1]),
            fused_experts=any(name.endswith("mlp.experts.gate_up_proj") for name in self),
            grouped_projections=any(name.endswith("linear_attn.in_proj_qkvz.weight") for name in self),
        )


class Source(Protocol):
    """The tensors of a checkpoint that make one parameter."""

    @property
    def names(self) -> tuple[str, ...]:
        """Their names."""
        ...

    def shapes(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """The shapes they must have, for a parameter of this shape."""
        ...

    def read(self, files: Files, index: Index) -> np.ndarray:
        """The part of the parameter at `index`, whose slices have both ends."""
        ...

    def write(self, x: np.ndarray) -> dict[str, np.ndarray]:
        """The tensors of a parameter."""
        ...


@dataclass(frozen=True)
class Same:
    """The tensor as it is, or the matrix transposed."""

    name: str
    transposed: bool = False

    @property
    def names(self):
        return (self.name,)

    def shapes(self, shape):
        return {self.name: shape[::-1] if self.transposed else shape}

    def read(self, files, index):
        return files.read(self.name, *index[::-1]).T if self.transposed else files.read(self.name, *index)

    def write(self, x):
        return {self.name: x.T if self.transposed else x}


class Piece(NamedTuple):
    """Rows of a matrix: `width` for each head, from row `first` on."""

    name: str
    first: int
    width: int


@dataclass(frozen=True)
class Heads:
    """`[D, heads, widths]` from rows of matrices `[out, D]`: of each head, its rows of every piece.

    A convolution, `[out, 1, D]`, is the same with an axis more.
    """

    pieces: tuple[Piece, ...]
    convolution: bool = False

    @property
    def names(self):
        return tuple(dict.fromkeys(piece.name for piece in self.pieces))

    def shapes(self, shape):
        rows = dict.fromkeys(self.names, 0)
        for piece in self.pieces:
            rows[piece.name] += shape[1] * piece.width
        return {name: (n, 1, shape[0]) if self.convolution else (n, shape[0]) for name, n in rows.items()}

    def read(self, files, index):
        columns, heads, widths = index
        parts = []
        for name, first, width in self.pieces:
            rows = slice(first + heads.start * width, first + heads.stop * width)
            x = files.read(name, rows, *[slice(None)] * self.convolution, columns)
            parts.append(x.reshape(heads.stop - heads.start, width, -1))
        return np.concatenate(parts, axis=1).transpose(2, 0, 1)[:, :, widths]

    def write(self, x):
        tensors: dict[str, list[np.ndarray]] = {name: [] for name in self.names}
        at = 0
        for name, _, width in self.pieces:
            tensors[name].append(x[:, :, at : at + width].transpose(1, 2, 0).reshape(-1, x.shape[0]))
            at += width
        rows = {name: np.concatenate(parts) for name, parts in tensors.items()}
        return {name: y[:, None] for name, y in rows.items()} if self.convolution else rows


@dataclass(frozen=True)
class HeadsOut:
    """`[heads, width, D]` from the columns of a matrix `[D, heads * width]`."""

    name: str
    width: int

    @property
    def names(self):
        return (self.name,)

    def shapes(self, shape):
        return {self.name: (shape[2], shape[0] * shape[1])}

    def read(self, files, index):
        heads, widths, rows = index
        x = files.read(self.name, rows, slice(heads.start * self.width, heads.stop * self.width))
        return x.T.reshape(heads.stop - heads.start, self.width, -1)[:, widths]

    def write(self, x):
        return {self.name: x.reshape(-1, x.shape[2]).T}


@dataclass(frozen=True)
class Experts:
    """`[E, in, out]` from a matrix `[out, in]` of each expert."""

    pattern: str  # with {} for the expert
    count: int

    @property
    def names(self):
        return tuple(self.pattern.format(e) for e in range(self.count))

    def shapes(self, shape):
        return dict.fromkeys(self.names, (shape[2], shape[1]))

    def read(self, files, index):
        experts, rows, columns = index
        return np.stack([files.read(name, columns, rows).T for name in self.names[experts]])

    def write(self, x):
        return {name: y.T for name, y in zip(self.names, x, strict=True)}


@dataclass(frozen=True)
class FusedExperts:
    """`[E, in, out]` from part `part` of `parts` of the rows of `[E, parts * out, in]`. It is read, never written."""

    name: str
    part: int
    parts: int

    @property
    def names(self):
        return (self.name,)

    def shapes(self, shape):
        return {self.name: (shape[0], self.parts * shape[2], shape[1])}

    def read(self, files, index):
        experts, rows, columns = index
        first = self.part * (files.shape(self.name)[1] // self.parts)
        x = files.read(self.name, experts, slice(first + columns.start, first + columns.stop), rows)
        return x.swapaxes(1, 2)

    def write(self, x):
        raise NotImplementedError


@dataclass(frozen=True)
class Stacked:
    """A parameter of the same kind of each block, with a leading axis of blocks."""

    blocks: tuple[Source, ...]

    @property
    def names(self):
        return tuple(name for block in self.blocks for name in block.names)

    def shapes(self, shape):
        return {name: x for block in self.blocks for name, x in block.shapes(shape[1:]).items()}

    def read(self, files, index):
        return np.stack([block.read(files, index[1:]) for block in self.blocks[index[0]]])

    def write(self, x):
        return {name: y for block, part in zip(self.blocks, x, strict=True) for name, y in block.write(part).items()}


def is_float32(name: tuple[Any, ...]) -> bool:
    return name[-1] in ("A_log", "dt_bias") or name[-3:-1] == ("linear_attn", "norm")


def source_of(config: QwenConfig, naming: Naming, name: tuple[Any, ...]) -> Source:
    """The source of the parameter at a path such as `("layers", 3, "self_attn", "q_proj", "kernel")`."""
    if name[0] == "blocks":
        length = config.block_length
        layers = range(int(name[2]), config.num_hidden_layers, length)
        return Stacked(tuple(source_of(config, naming, ("layers", i, *name[3:])) for i in layers))
    match name:
        case ("embed_tokens", "embedding"):
            return Same(f"{naming.prefix}embed_tokens.weight")
        case ("lm_head", "kernel"):
            return Same("lm_head.weight", transposed=True)
        case ("layers", i, *rest):
            return _layer_source(config, naming, f"{naming.prefix}layers.{i}.", tuple(rest))
        case ("mtp", "layers", i, *rest):
            return _layer_source(config, naming, f"mtp.layers.{i}.", tuple(rest))
        case ("mtp", "fc", "kernel"):
            return Same("mtp.fc.weight", transposed=True)
        case ("mtp", norm, "scale"):
            return Same(f"mtp.{norm}.weight")
        case _:
            return Same(f"{naming.prefix}norm.weight")


def _layer_source(config: QwenConfig, naming: Naming, prefix: str, name: tuple[Any, ...]) -> Source:
    where = prefix + ".".join(name[:-1])
    match name:
        case ("linear_attn", *rest):
            return _gdn_source(config, naming, f"{prefix}linear_attn.", tuple(rest))
        case ("self_attn", "q_proj", _):
            return Heads((Piece(f"{where}.weight", 0, 2 * config.head_dim),))
        case ("self_attn", "k_proj" | "v_proj", _):
            return Heads((Piece(f"{where}.weight", 0, config.head_dim),))
        case ("self_attn", "o_proj", _):
            return HeadsOut(f"{where}.weight", config.head_dim)
        case ("mlp", "router", _):
            return Same(f"{prefix}mlp.gate.weight", transposed=True)
        case ("mlp", "gate_proj" | "up_proj" | "down_proj" as part):
            if not naming.fused_experts:
                return Experts(f"{prefix}mlp.experts.{{}}.{part}.weight", config.num_experts)
            if part == "down_proj":
                return FusedExperts(f"{prefix}mlp.experts.down_proj", 0, 1)
            return FusedExperts(f"{prefix}mlp.experts.gate_up_proj", ("gate_proj", "up_proj").index(part), 2)
        case (*_, "kernel"):
            return Same(f"{where}.weight", transposed=True)
        case _:
            return Same(f"{where}.weight")


def _gdn_source(config: QwenConfig, naming: Naming, prefix: str, name: tuple[Any, ...]) -> Source:
    H, K, V = config.linear_num_key_heads, config.linear_key_head_dim, config.linear_value_head_dim
    R = config.linear_num_value_heads // H

    def qkv(name: str) -> tuple[Piece, ...]:
        return (Piece(name, 0, K), Piece(name, H * K, K), Piece(name, 2 * H * K, R * V))

    match name:
        case ("in_proj_qkvz", _) if naming.grouped_projections:
            return Heads((Piece(f"{prefix}in_proj_qkvz.weight", 0, 2 * K + 2 * R * V),))
        case ("in_proj_qkvz", _):
            return Heads((*qkv(f"{prefix}in_proj_qkv.weight"), Piece(f"{prefix}in_proj_z.weight", 0, R * V)))
        case ("in_proj_ba", _) if naming.grouped_projections:
            return Heads((Piece(f"{prefix}in_proj_ba.weight", 0, 2 * R),))
        case ("in_proj_ba", _):
            return Heads((Piece(f"{prefix}in_proj_b.weight", 0, R), Piece(f"{prefix}in_proj_a.weight", 0, R)))
        case ("conv1d",):
            return Heads(qkv(f"{prefix}conv1d.weight"), convolution=True)
        case ("out_proj", _):
            return HeadsOut(f"{prefix}out_proj.weight", V)
        case ("norm", _):
            return Same(f"{prefix}norm.weight")
        case _:
            return Same(prefix + name[0])
