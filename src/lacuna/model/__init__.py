"""The model made ready: built from Hugging Face's own code, with attention and loss applied from outside."""
