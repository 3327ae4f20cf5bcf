"""The layout: processes, the device mesh, and how a model is spread over it."""
