"""One of the other ranks of a learner, started by its rank 0 or by a launcher, not by people."""

import argparse
import os
import signal
import threading
import time

from capo.launch import libraries
from capo.launch.diagnosis import stacks_on_sigquit
from capo.launch.exit_codes import EXIT_FAILURE
from capo.protocol.errors import ConfigError

LEADER_PID = "CAPO_LEADER_PID"  # whose end a rank that its learner started does not outlive
_CHECK_S = 0.2


def launched() -> tuple[int, int] | None:
    """This process's rank and how many there are, if a launcher said both.

    Raises ConfigError where this is no place among ranks, as when somebody else set a variable.
    """
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    rank, num_ranks = os.environ["RANK"], os.environ["WORLD_SIZE"]
    if not (rank.isdecimal() and num_ranks.isdecimal() and int(rank) < int(num_ranks)):
        raise ConfigError(
            f"RANK is {rank!r} and WORLD_SIZE is {num_ranks!r} in the environment, which no "
            "launcher of ranks sets: unset them."
        )
    return int(rank), int(num_ranks)


def rank_of_environment() -> int:
    """What a launcher made of this process; 0 where there was none."""
    place = launched()
    return place[0] if place else 0


def command(args: argparse.Namespace) -> int:
    if rank_of_environment() == 0:
        raise ConfigError(
            "a rank is started by its learner (learner.ranks) or by a launcher such as torchrun."
        )
    return serve()


def serve() -> int:
    """Do what rank 0 says to its end. What asks a process to stop is for rank 0, which ends this
    one; a launcher, or a cluster's scheduler, sends it to all."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    stacks_on_sigquit()
    if leader := os.environ.get(LEADER_PID):  # before the imports, which take seconds
        threading.Thread(target=_end_with, args=(int(leader),), daemon=True).start()
    libraries.prepare()
    from capo.learner.lead import follow
    from capo.learner.orders import Orders
    from capo.learner.ranks import join, leave

    follow(Orders(join()))
    leave()
    return 0


def _end_with(leader: int) -> None:
    """Exit within a second of rank 0's death, whatever this process is in the middle of."""
    while os.getppid() == leader:
        time.sleep(_CHECK_S)
    os._exit(EXIT_FAILURE)
