"""Search for the best layouts: choices in sequence, their bounds, and the order of results."""
