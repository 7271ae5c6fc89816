"""Where checkpoints lie: directories of this machine, and copies at a URL."""
