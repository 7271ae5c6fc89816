"""Programs of row optimizers, which the compiled core, GPU kernels and plain PyTorch can run."""
