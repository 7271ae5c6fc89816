"""Why a plan is as it is, how it differs from another one, and what would help where none exists."""
