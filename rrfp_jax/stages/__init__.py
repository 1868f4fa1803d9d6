"""From a loss function to compiled kernels: mark, cut, split, compile. No I/O."""
