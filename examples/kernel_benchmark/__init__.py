"""The parts of `benchmark_kernels.py`, one module for each idea; a section writes its figures into the report it is given."""
