"""Tests on several ranks."""
