"""lacuna trains the Hugging Face causal language model you already have, from one TOML file."""

import time

__version__ = "0.1.0"
BEGAN = time.monotonic()  # nearly when this process did
