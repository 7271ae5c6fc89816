"""Choice of settings by trial runs, before or as the run itself."""
