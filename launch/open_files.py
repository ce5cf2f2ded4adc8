"""How many files and connections this process may have open: as many as the system lets it."""

import resource

ENOUGH = 1 << 16


def allow_many_open_files() -> None:
    """A learner has a connection or two for every actor, and most systems begin with 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = ENOUGH if hard == resource.RLIM_INFINITY else min(hard, ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
