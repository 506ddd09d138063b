"""The loop that users see, and how its processes start, stop and fail.

Importing this package loads nothing: the launcher and the command line must answer without torch.
"""
