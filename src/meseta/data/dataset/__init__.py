"""A prepared dataset: what its dataset.json says, the rules for its values, and whether its files keep them."""
