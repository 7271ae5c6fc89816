"""Roles of raw columns: from a schema file, from options, or inferred from names and values."""
