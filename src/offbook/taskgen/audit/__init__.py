"""What must not be readable: leftovers are scrubbed from a tree, and deleted code is searched for everywhere else."""

from offbook.taskgen.audit.corpus import Corpus, Leak, audit
from offbook.taskgen.audit.verdict import audit_all, given_away, standard_library

__all__ = ["Corpus", "Leak", "audit", "audit_all", "given_away", "standard_library"]
