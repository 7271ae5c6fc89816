"""What trainings of several configs over paired seeds say: figures, intervals, and the page of a suite."""
