"""What must not be readable: leftovers are scrubbed from a tree, and deleted code is searched for everywhere else."""
