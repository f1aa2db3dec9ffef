"""Views of a run folder for people: the static report."""
