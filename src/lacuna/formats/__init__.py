"""What is written and opened: checkpoints, Hugging Face folders, GGUF files, adapters."""
