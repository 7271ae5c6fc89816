"""Row optimizers as programs: the same few instructions for the compiled core, GPU kernels and plain torch."""
