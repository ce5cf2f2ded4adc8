"""What the exit code of a `capo` command means."""

EXIT_FAILURE = 1
EXIT_BAD_INPUT = 2  # as argparse has it
EXIT_INTERRUPTED = 130  # as shells tell a process that SIGINT ended
