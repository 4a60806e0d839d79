"""The parts of `benchmark.py`, one module for each idea."""
