"""Find the fastest settings of a recipe on this machine by short measured runs."""
