"""The search for a plan: a workload as arrays, constructions, local improvement, and what no plan can go below."""
