"""Samples in, weights out. Knows no algorithm, no task, no tool."""
