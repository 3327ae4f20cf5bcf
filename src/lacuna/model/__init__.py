"""The model made ready: Hugging Face's own code, with attention and loss applied from outside."""
