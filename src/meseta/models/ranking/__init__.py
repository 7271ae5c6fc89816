"""Classic recommendation models, one module per architecture."""
