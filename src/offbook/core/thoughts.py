"""Where a message that thinks ends to do so: thoughts stand in its text, before everything else."""

THINK_START, THINK_END = "<think>", "</think>"


def answer_start(text: str, thinking: bool = False) -> int:
    """Where the thinking ends and calls may begin.

    Only a message that begins with <think>, or whose header opened it (`thinking`), thinks, and it does so up to the
    first </think>. Without one it is thinking to its end, and an attempt inside is no call. A later <think> is text:
    code may well contain it.
    """
    if not (thinking or text.lstrip().startswith(THINK_START)):
        return 0
    end = text.find(THINK_END)
    return len(text) if end < 0 else end + len(THINK_END)
