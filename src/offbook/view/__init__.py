"""Run folders for people: one page, served live by `offbook view` or written as one file."""
