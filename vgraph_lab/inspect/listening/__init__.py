"""Does it sound the same? Audio sets, distances with stated limits, clicks at chunk seams, and blind tests."""
