"""Raw files: one module for each format that `meseta prepare` reads, and what several formats share."""
