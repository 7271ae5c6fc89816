"""Distinct ids."""
