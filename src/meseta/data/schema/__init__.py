"""What the columns of raw files are: as a schema file or options say, else guessed from names and values."""
