"""Charts as SVG, and functions that write HTML and SVG."""
