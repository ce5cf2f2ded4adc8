"""What strangers say reaches a terminal as text, and not more often than it can be read."""

import io
import unicodedata

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from capo.launch.main import main
from capo.launch.progress import Progress
from capo.learner.run_file import RunFile
from capo.learner.scheduler_status import SchedulerStatus
from capo.learner.status_file import ActorStatus, LearnerStatus, status_lines
from capo.learner.text_table import text_table
from capo.protocol.sayings import Seldom, plain

EVIL = "ann\x1b]0;owned\x07\x1b[2J\nlearner: all is well\u202egpj.exe\x9b31m\r"
DIRECTIONS = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
HARMLESS = "ann\\x1b]0;owned\\x07\\x1b[2J\\nlearner: all is well\\u202egpj.exe\\x9b31m\\r"


def test_what_would_steer_a_terminal_is_shown_instead():
    assert plain(EVIL) == HARMLESS
    assert plain("Schöne Grüße, 你好 🎲 [bold]x[/]") == "Schöne Grüße, 你好 🎲 [bold]x[/]"


@given(st.text(alphabet=st.characters(exclude_categories=[])))
def test_nothing_gets_through_on_a_second_line_or_as_a_control(text):
    shown = plain(text)
    assert len(shown.splitlines()) <= 1
    for character in shown:
        assert unicodedata.category(character) not in ("Cc", "Cs", "Zl", "Zp")
        assert character not in DIRECTIONS
    shown.encode("utf-8")
    assert plain(shown) == shown


def test_a_name_cannot_write_on_the_learners_terminal():
    out = io.StringIO()
    progress = Progress(Console(file=out, width=200), 1)
    progress.note(f"{EVIL} joined.")
    assert out.getvalue() == f"{HARMLESS} joined.\n"


def test_neither_can_a_run_that_a_stranger_made(tmp_path, capsys):
    facts = {"run_id": "r", "config": "{}", "version.capo-rl": EVIL}
    RunFile.create(tmp_path, facts).close()
    assert main(["status", str(tmp_path)]) == 2
    assert f"written by {HARMLESS}" in capsys.readouterr().err


def test_neither_can_a_status_nor_a_table():
    actor = ActorStatus(
        actor_id=EVIL, name=EVIL, ready=True, weights_version=0, playing=0, capacity=1,
        waiting_for=EVIL, connected_s=0.0, silent_s=0.0, metrics={},
    )  # fmt: skip
    scheduler = SchedulerStatus(
        version=0, batches=0, playing={EVIL: 1}, waiting=0, buffered=0, evaluation_done=0,
        evaluation_total=0, counts={}, last_error=EVIL, waits=(),
    )  # fmt: skip
    status = LearnerStatus(
        written_at=0.0, pid=1, doing="x", doing_s=0.0, scheduler=scheduler, actors=(actor,)
    )
    for line in [*status_lines(status, now=0.0), *text_table(("fate", EVIL), [(EVIL, "1")])]:
        assert plain(line) == line


def test_of_a_flood_of_sentences_the_first_are_told_and_then_one_a_second_with_their_number():
    now = [100.0]
    told: list[str] = []
    say = Seldom(told.append, burst=2, clock=lambda: now[0])
    for number in range(1000):
        say(f"refused {number}")
    say.due()
    assert told == ["refused 0", "refused 1"]
    now[0] += 1.0
    say.due()
    say.due()
    assert told[2:] == ["refused 999 (and 997 more like it)"]
    now[0] += 60.0
    for number in range(3):
        say(f"later {number}")
    assert told[3:] == ["later 0", "later 1"]
    now[0] += 1.0
    say.due()
    assert told[5:] == ["later 2"]
