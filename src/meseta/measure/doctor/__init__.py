"""What this machine has, what is missing, and how to get it: the checks of `meseta doctor`.

Nothing here loads torch: what only torch can tell comes from a child process, whose crash is told as well.
"""
