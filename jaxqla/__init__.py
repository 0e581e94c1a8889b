"""Gated DeltaNet for JAX on NVIDIA Hopper, and as plain JAX everywhere else."""

from jaxqla.ops import explain, export_checks, gated_delta, save_residuals

__all__ = ["__version__", "explain", "export_checks", "gated_delta", "save_residuals"]

__version__ = "0.1.0"
