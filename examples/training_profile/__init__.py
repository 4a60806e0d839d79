"""The parts of `profile_training.py`, one module for each idea; a part writes its figures into the result it is given."""
