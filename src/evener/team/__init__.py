"""Who is in a team, where each computes, how they meet, and how their processes are run.

Importing this package loads nothing: the launcher and the command line must answer without torch.
"""
