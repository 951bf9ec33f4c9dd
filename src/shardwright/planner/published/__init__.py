"""Read published measurements of other trainers and predict them."""
