"""What stands in the place of Hugging Face's own layers; `wrapping` says what may wrap what."""
