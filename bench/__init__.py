"""What measures the library: golden streams, mutants of its suite, the walk of a step, the lines of its core, a GPU."""
