"""Operators, one subpackage each: a public function, a reference in plain PyTorch, and faster kernels."""
