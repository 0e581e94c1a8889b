"""Flax (nnx) layers of hybrid models, their states, and their sharding."""

from jaxqla.flax.attention import GatedAttention
from jaxqla.flax.cache import GDNState, HybridCache, KVState, Places
from jaxqla.flax.gated_delta_net import GatedDeltaNet
from jaxqla.flax.mlp import SparseMoE, SwiGLU
from jaxqla.flax.norms import GatedRMSNorm, RMSNorm
from jaxqla.flax.sharding import LOGICAL_RULES, constrain, make_mesh, use_mesh

__all__ = [
    "LOGICAL_RULES",
    "GDNState",
    "GatedAttention",
    "GatedDeltaNet",
    "GatedRMSNorm",
    "HybridCache",
    "KVState",
    "Places",
    "RMSNorm",
    "SparseMoE",
    "SwiGLU",
    "constrain",
    "make_mesh",
    "use_mesh",
]
