"""What must not be readable: leftovers are scrubbed from a tree, and deleted code is searched for everywhere else."""

from offbook.taskgen.audit.corpus import Corpus, Leak, audit, too_small
from offbook.taskgen.audit.scrub import compiled_extensions, scrub, single_commit

__all__ = ["Corpus", "Leak", "audit", "compiled_extensions", "scrub", "single_commit", "too_small"]
