"""Benchmarks behind ``minisgl bench``: each drives production code and prints what it measured."""
