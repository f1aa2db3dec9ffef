"""Tasks: features deleted from repositories, verified by running the tests, kept as Harbor task folders."""
