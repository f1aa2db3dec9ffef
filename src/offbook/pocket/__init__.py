"""`pocket`: a model of under a million parameters, made on the spot, that really drives the tools.

It learns from demonstrations that a scripted agent gives in the real harness, mistakes included, on tasks in small
repositories that are made up (tasks.py), and that show what to do when a hint is given. So everything that offbook does
can be seen on a laptop in minutes.
"""
