"""What is minimised: pairs of data and loss over the one loop."""
