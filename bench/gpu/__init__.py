"""One check of everything that runs on a GPU, in phases."""
