"""Text from the model."""
