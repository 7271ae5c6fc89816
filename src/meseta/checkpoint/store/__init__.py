"""Stores of checkpoints: local folders and URLs, and mirrors that copy one store to another."""
