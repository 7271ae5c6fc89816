"""Tests of the documentation: what its code prints, its links, and the site."""
