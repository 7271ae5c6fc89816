"""Search for a sharding plan: options per table, constructions, local improvement, and a lower bound."""
