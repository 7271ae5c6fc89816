"""`meseta bench`: operators and training beside other systems."""
