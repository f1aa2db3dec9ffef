"""What the agent is told: the request, and whether what the tests check can be known from it and the tree."""
