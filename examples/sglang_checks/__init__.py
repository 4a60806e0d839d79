"""The checks of `check_sglang.py`, one module for each idea; each takes parsed arguments and returns what its JSON file holds."""
