"""Evaluation: suites, numbers with intervals, comparisons, and what of a suite was in the training tasks."""
