"""Measuring on this machine: how fast operators and training are, beside what memory gives and beside other systems."""
