"""Tests of the documentation: the output of its code, its links, and the site."""
