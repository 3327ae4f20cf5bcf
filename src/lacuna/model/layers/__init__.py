"""Layers that replace Hugging Face's own; `wrapping` says in which order they wrap a layer."""
