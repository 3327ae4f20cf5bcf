"""Before the run: does it fit, and what will it do."""
