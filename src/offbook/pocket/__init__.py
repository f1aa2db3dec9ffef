"""`pocket`: a model with under a million parameters, trained on first use, that calls the real tools.

It imitates demonstrations of a scripted agent, mistakes included, in the real harness on tasks in small generated
repositories (tasks.py); some show how to follow a hint. So all of offbook runs on a laptop in minutes.
"""
