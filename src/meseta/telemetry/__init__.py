"""What a run tells of itself: measured times, and the records of its files. No torch here."""
