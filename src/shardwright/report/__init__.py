"""Pages and summaries of runs and plans, made from events alone."""
