"""The dispatcher: a pure core for each stage, and at the edge the threads that drive it."""
