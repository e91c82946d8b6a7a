"""Measurements of speed: the place in the layers is taken, the commands are still to come."""
