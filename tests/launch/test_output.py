"""Commands whose words reach nobody: a pipe without a reader, a full disk, a closed terminal."""

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator

import pytest

ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
CHECK = ("check", "quickstart")
LASTING = """
    import sys
    from capo.launch.output import unfailing
    from rich.console import Console

    with unfailing("stdout"), unfailing("stderr"):
        console = Console()
        for number in range(500):
            print("a line of a print", number)
            console.print("a line of a console", number)
            print("a line of an error", number, file=sys.stderr)
    sys.exit(7)
"""


@pytest.fixture
def unread() -> Iterator[int]:
    """A pipe whose reader has left."""
    reading, writing = os.pipe()
    os.close(reading)
    yield writing
    os.close(writing)


@pytest.fixture
def full() -> Iterator[int]:
    descriptor = os.open("/dev/full", os.O_WRONLY)
    yield descriptor
    os.close(descriptor)


@pytest.fixture
def hung_up() -> Iterator[int]:
    """A terminal that was closed."""
    window, terminal = os.openpty()
    os.close(window)
    yield terminal
    os.close(terminal)


def capo(*arguments: str, **streams) -> subprocess.CompletedProcess:
    return python("-m", "capo.launch.main", *arguments, **streams)


def python(*arguments: str, **streams) -> subprocess.CompletedProcess:
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **streams}
    return subprocess.run([sys.executable, *arguments], env=ENVIRONMENT, text=True, **streams)


@pytest.mark.parametrize("arguments", [CHECK, ("--help",), ("--version",)])
def test_a_reader_that_has_enough_is_no_failure(arguments, unread):
    ended = capo(*arguments, stdout=unread)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_result_that_does_not_fit_on_the_disk_is_one_sentence(full):
    ended = capo(*CHECK, stdout=full)
    assert (ended.returncode, ended.stderr) == (1, "capo check: No space left on device.\n")


def test_the_exit_code_does_not_depend_on_who_hears_the_sentence(unread, full):
    for deaf in (unread, full):
        assert capo("report", "/nowhere", stderr=deaf).returncode == 2


def test_without_an_output_at_all_a_command_works():
    command = f"exec {sys.executable} -m capo.launch.main check quickstart >&-"
    ended = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, env=ENVIRONMENT)
    assert (ended.returncode, ended.stderr) == (0, b"")


@pytest.mark.parametrize("where", ["unread", "full", "hung_up"])
def test_what_lasts_goes_on_when_nobody_hears_it(where, request):
    deaf = request.getfixturevalue(where)
    assert python("-c", textwrap.dedent(LASTING), stdout=deaf, stderr=deaf).returncode == 7


def test_all_that_is_said_arrives_where_somebody_listens():
    ended = python("-c", textwrap.dedent(LASTING))
    assert ended.stdout.splitlines() == [
        f"a line of a {speaker} {number}"
        for number in range(500)
        for speaker in ("print", "console")
    ]
    assert len(ended.stderr.splitlines()) == 500


def test_a_letter_that_the_terminal_does_not_know_is_an_escape():
    code = "from capo.launch.output import unfailing\nwith unfailing('stdout'): print('± ä')"
    ended = subprocess.run(
        [sys.executable, "-c", code],
        env={**ENVIRONMENT, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
    )
    assert (ended.returncode, ended.stdout) == (0, "\\xb1 \\xe4\n")


def test_a_signal_handler_speaks_in_the_midst_of_another_word():
    code = """
        import signal, sys
        from capo.launch.output import unfailing

        heard = []

        def handle(number, frame):
            print("the handler speaks", flush=True)
            heard.append(number)

        with unfailing("stdout"):
            signal.signal(signal.SIGALRM, handle)
            signal.setitimer(signal.ITIMER_REAL, 0.002, 0.002)
            while len(heard) < 200:
                print("a long line " * 400, flush=True)
            signal.setitimer(signal.ITIMER_REAL, 0)
    """
    ended = python("-c", textwrap.dedent(code))
    assert ended.stderr == ""
    assert ended.returncode == 0
    assert ended.stdout.count("the handler speaks") == 200


def test_stop_signals_leave_an_ignored_hangup_alone():
    from capo.launch.stopping import stop_signals

    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        assert signal.SIGHUP in stop_signals()
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
        assert signal.SIGHUP not in stop_signals()
    finally:
        signal.signal(signal.SIGHUP, before)
