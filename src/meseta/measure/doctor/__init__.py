"""Checks of `meseta doctor`: hardware, system limits and packages of this machine, with remedies for problems.

No module here imports torch. Child processes run the probes that need it, so that a crash becomes a finding.
"""
