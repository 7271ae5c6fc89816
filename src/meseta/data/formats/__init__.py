"""Raw file formats that `meseta prepare` reads, one module per format, and the code that they share."""
