"""Views of a run folder for people: the page that `offbook view` serves or writes, and the report."""
