"""Models that the command line trains."""
