"""Measurements: medians and spread of interleaved runs, with the machine and the commit they were made on."""
