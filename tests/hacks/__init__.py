"""Scripted rollouts that cheat, and honest ones that look as if they did. All run in the real sandbox."""
