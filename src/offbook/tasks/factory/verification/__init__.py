"""Whether a deletion makes a task: its tests without it, with trivial bodies, as mutants, and with other inputs."""
