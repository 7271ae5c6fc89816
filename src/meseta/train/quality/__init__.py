"""`meseta quality`: compares configs over synthetic worlds or datasets, and over seeds."""
