"""The layout of a run: its processes, their mesh, and how a model is spread over it."""
