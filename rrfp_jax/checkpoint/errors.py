"""What goes wrong with checkpoints."""


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the message says which, and what to do."""
