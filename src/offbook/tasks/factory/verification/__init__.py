"""Whether a deletion makes a task: its tests without it, with trivial bodies, as twins, and with other inputs."""
