"""Qwen hybrid models: configurations, the model, Hugging Face weights, losses and generation."""

from jaxqla.models.config import QwenConfig
from jaxqla.models.generation import generate, stream
from jaxqla.models.hugging_face import Report, load, save
from jaxqla.models.loss import next_token_loss
from jaxqla.models.qwen import QwenForCausalLM

__all__ = ["QwenConfig", "QwenForCausalLM", "Report", "generate", "load", "next_token_loss", "save", "stream"]
