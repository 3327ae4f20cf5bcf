"""What is minimised and what is logged of it: all that the one loop knows of a task."""
