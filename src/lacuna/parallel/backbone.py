"""The part of a Hugging Face model that makes hidden states: all but its head."""

from torch import nn
from transformers import PreTrainedModel


def backbone(model: PreTrainedModel) -> nn.Module:
    """The module whose forward pass gives `last_hidden_state`."""
    base = model.base_model
    return model.model if base is model else base  # Llama4ForCausalLM has it under another name
