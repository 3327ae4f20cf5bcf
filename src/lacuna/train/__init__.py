"""The loop, and what it keeps: optimizer, schedule, checkpoints, metrics, validation."""
