"""lacuna trains the Hugging Face causal language model you already have, from one TOML file."""

__version__ = "0.1.0"
