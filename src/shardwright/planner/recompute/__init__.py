"""Choice of the results that layers keep under recomputation."""
