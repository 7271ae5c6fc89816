"""Types of the compiled core."""
