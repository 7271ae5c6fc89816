"""Operators: one folder each, with a public function, a short reference in plain torch, and faster forms beside it."""
