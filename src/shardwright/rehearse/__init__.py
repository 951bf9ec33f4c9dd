"""The real training step watched from inside: every collective in order, every live byte, on ranks that need not exist."""
