"""Divide the work of a window over ranks, and decide when the team averages.

Pure: no torch, no clock, no I/O. Times come in as numbers, plans go out as frozen dataclasses, so
the code that runs in production is the code that property tests and simulations exercise.
"""
