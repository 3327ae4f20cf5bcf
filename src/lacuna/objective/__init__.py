"""What is minimised, and what is told of it: all that the one loop is given of a task."""
