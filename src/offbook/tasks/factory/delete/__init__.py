"""Taking a feature out of a tree so that the rest still works, and the patch that brings it back."""
