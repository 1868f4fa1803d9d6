"""What turns a pipeline into a training run."""
