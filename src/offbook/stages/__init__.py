"""Other ways to train than the circle of loop/: pretraining, imitation, hints from logs. Each is a run of its own."""
