"""Checkpoints: what a run needs to go on exactly where it was, and to be used elsewhere."""
