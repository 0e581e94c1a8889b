"""Gated DeltaNet for JAX on NVIDIA Hopper, and as plain JAX everywhere else."""

from jaxqla import _launch
from jaxqla.convolution import causal_conv1d, causal_conv1d_step
from jaxqla.decoding import gated_delta_step
from jaxqla.gates import gdn_gates
from jaxqla.ops import FINAL_STATE_NAME, OUTPUT_NAME, explain, export_checks, gated_delta, save_residuals

__all__ = [
    "FINAL_STATE_NAME",
    "OUTPUT_NAME",
    "__version__",
    "causal_conv1d",
    "causal_conv1d_step",
    "explain",
    "export_checks",
    "gated_delta",
    "gated_delta_step",
    "gdn_gates",
    "save_residuals",
]

__version__ = "0.1.0"

_launch.register_if_built()
