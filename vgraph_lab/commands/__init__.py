"""What the commands of the command line do. :mod:`vgraph_lab.cli` puts them together."""
