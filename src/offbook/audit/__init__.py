"""What must not be readable: leftovers are scrubbed from a tree, and deleted code is searched for everywhere else."""

from offbook.audit.corpus import Corpus, Leak, audit, too_small
from offbook.audit.scrub import compiled_extensions, scrub, single_commit

__all__ = ["Corpus", "Leak", "audit", "compiled_extensions", "scrub", "single_commit", "too_small"]
