"""Other ways to train a model than the circle of loop/: imitation. Each is a run of its own, with the same trainer."""
