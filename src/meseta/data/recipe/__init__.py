"""Recipes: rows of a dataset that are made from its raw files as they are read, by what prepare found out of them."""
