"""Timing several implementations in turns, each in processes of its own."""
