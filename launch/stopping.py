"""The signals that ask a process to stop in order, and what a repeated one means."""

import signal


def stop_signals() -> tuple[signal.Signals, ...]:
    """Ctrl-C, SIGTERM, and the end of the terminal, unless that is ignored (as under nohup)."""
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        return signal.SIGINT, signal.SIGTERM
    return signal.SIGINT, signal.SIGTERM, signal.SIGHUP


def is_impatient(number: int) -> bool:
    """Whether a second one asks for more than the first: a terminal that ends may say so twice."""
    return number != signal.SIGHUP
