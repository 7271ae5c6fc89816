"""Recipes: datasets without Parquet files, whose rows are computed from the raw files while they are read."""
