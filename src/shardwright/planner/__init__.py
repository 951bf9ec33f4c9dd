"""What a layout costs before anybody pays for it: memory and time of a training step, and the search for the best layout. No torch."""
