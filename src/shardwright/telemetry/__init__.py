"""What a run says of itself: events (the source), the meter that measures, and the sinks that show. Imports no torch."""
