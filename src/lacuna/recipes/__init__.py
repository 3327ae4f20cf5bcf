"""Ready-to-run configurations."""
