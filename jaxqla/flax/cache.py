"""What layers keep of the tokens that they have seen, and where new tokens go.

States are frozen pytrees: they go in and come out, and no module holds one. Where they are donated to a jitted function
they are updated in place.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxqla._checks import message


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class GDNState:
    """State of a gated delta layer, of fixed size.

    Attributes:
        conv: The last `W - 1` inputs of the convolution, `[B, W-1, H, 2K + RV]`, per key head its q, k and values.
        recurrent: The state of the recurrence, `[B, HV, K, V]` float32.
    """

    conv: Float[Array, "B W1 H C"]
    recurrent: Float[Array, "B HV K V"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVState:
    """Keys and values of an attention layer: slot `s` of a row holds its token `s`, padding not counted.

    Attributes:
        keys: `[B, S, G, D]` for `G` key-value heads, with their rotary positions applied.
        values: `[B, S, G, D]`.
    """

    keys: Float[Array, "B S G D"]
    values: Float[Array, "B S G D"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class HybridCache:
    """The states of all layers of a model, and how many tokens each row has seen.

    Attributes:
        layers: A state for each layer; for each place in a block, with a leading axis of blocks, where layers are
            scanned.
        lengths: Tokens of each row so far, padding not counted: `[B]` int32.
        starts: The first of those that belongs to the current document of the row: `[B]` int32.
    """

    layers: tuple[GDNState | KVState, ...]
    lengths: Int[Array, " B"]
    starts: Int[Array, " B"]


class Places(NamedTuple):
    """Where the tokens of a call are in their rows, padding not counted.

    Attributes:
        is_token: Which are tokens and no padding, or None where all are.
        slots: The index of each token in its row; at padding, a number past every slot.
        starts: The index of the first token of its document.
        positions: The index within the document, for rotary embeddings.
    """

    is_token: Bool[Array, "B T"] | None
    slots: Int[Array, "B T"]
    starts: Int[Array, "B T"]
    positions: Int[Array, "B T"]

    @staticmethod
    def of(
        shape: tuple[int, ...],
        segment_ids: Int[Array, "B T"] | None,
        positions: Int[Array, "B T"] | None = None,
        cache: HybridCache | None = None,
    ) -> "Places":
        """Counts tokens from those of the cache on, and documents by the changes of `segment_ids`.

        Args:
            shape: Rows and tokens, `(B, T)`.
            segment_ids: Int32; 0 is padding, a change of id starts another document. None where all are tokens of one.
            positions: For the rotary embeddings, in the place of those counted.
            cache: What earlier calls left.

        Raises:
            ValueError: `segment_ids` or `positions` have another shape.
        """
        B, T = shape
        for name, x in (("segment_ids", segment_ids), ("positions", positions)):
            if x is not None and x.shape != (B, T):
                raise ValueError(message("Places.of", name, f"have shape (B, T) = {(B, T)}", x.shape))
        lengths = jnp.zeros(B, jnp.int32) if cache is None else cache.lengths
        first = jnp.zeros(B, jnp.int32) if cache is None else cache.starts
        if segment_ids is None:
            is_token = None
            slots = lengths[:, None] + jnp.arange(T, dtype=jnp.int32)
            starts = jnp.broadcast_to(first[:, None], (B, T))
        else:
            is_token = segment_ids != 0
            count = jnp.cumsum(is_token, axis=1, dtype=jnp.int32)
            slots = jnp.where(is_token, lengths[:, None] + count - 1, jnp.iinfo(jnp.int32).max)
            begins = is_token & (segment_ids != _last_id(segment_ids)) & (count > 1)
            starts = lax.cummax(jnp.where(begins, slots, first[:, None]), axis=1)
        return Places(is_token, slots, starts, slots - starts if positions is None else positions)

    def advance(self, cache: HybridCache, layers: tuple[GDNState | KVState, ...]) -> HybridCache:
        """The cache after the tokens of this call."""
        B, T = self.slots.shape
        new = jnp.full(B, T, jnp.int32) if self.is_token is None else jnp.sum(self.is_token, axis=1, dtype=jnp.int32)
        return HybridCache(layers, cache.lengths + new, self.starts[:, -1] if T else cache.starts)


def _last_id(segment_ids: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """The id of the last token before each; 0 where there is none."""
    T = segment_ids.shape[1]
    index = jnp.where(segment_ids != 0, jnp.arange(T, dtype=jnp.int32), -1)
    last = jnp.pad(lax.cummax(index, axis=1), ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
    return jnp.where(last >= 0, jnp.take_along_axis(segment_ids, jnp.maximum(last, 0), axis=1), 0)
