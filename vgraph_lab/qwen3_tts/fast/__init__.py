"""The fast form of the incremental step. Importing a module of this package needs Triton."""
