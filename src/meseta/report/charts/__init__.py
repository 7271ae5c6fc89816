"""Charts and plans as SVG, and the markup under them."""
