"""Gated DeltaNet for JAX on NVIDIA Hopper, and as plain JAX everywhere else."""

from jaxqla.ops import explain, gated_delta

__all__ = ["__version__", "explain", "gated_delta"]

__version__ = "0.1.0"
