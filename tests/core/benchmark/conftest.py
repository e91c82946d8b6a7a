"""A clean process for each command."""

from support.clean_process import clean_process

__all__ = ["clean_process"]
