"""What a plan costs: seconds of a step and bytes of every rank, by the constants of a cost model or its networks."""
