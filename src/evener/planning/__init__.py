"""Divide the work of a window over ranks, and decide when the team averages.

Pure: no torch, no clock, no I/O. Times are arguments, and plans are frozen dataclasses, so property
tests and simulations run the same code as production.
"""
