"""A learner of one file, to be killed: `python -m tests.protocol.learner_process ADDRESS FILE`."""

import sqlite3
import sys
import threading

from capo.protocol.messages import Welcome
from capo.protocol.server import Server


class FileHandler:
    """Deliveries and last sequences in SQLite; a duplicate key fails the commit."""

    def __init__(self, path: str):
        self.database = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        self.database.execute("pragma journal_mode=wal")
        self.database.execute(
            "create table if not exists steps "
            "(episode, number, tokens, primary key (episode, number))"
        )
        self.database.execute(
            "create table if not exists actors (actor primary key, last_sequence)"
        )

    def hello(self, hello):
        row = self.database.execute(
            "select last_sequence from actors where actor = ?", (hello.actor_id,)
        ).fetchone()
        return Welcome(
            run_id="run",
            learner_name="learner",
            last_sequence=row[0] if row else 0,
            window=8,
            heartbeat_s=0.1,
            dead_after_s=5.0,
            setup=None,
        )

    def commit(self, deliveries):
        self.database.execute("begin immediate")
        for actor_id, delivery in deliveries:
            for step in delivery.steps:
                row = (step.episode_id, step.index, step.action.tobytes())
                self.database.execute("insert into steps values (?, ?, ?)", row)
            self.database.execute(
                "insert or replace into actors values (?, ?)", (actor_id, delivery.sequence)
            )
        self.database.execute("commit")

    def control(self, actor_id, message):
        pass

    def lost(self, actor_id, reason):
        pass

    def report(self):
        return b'{"version": 7}'

    def tick(self):
        pass


if __name__ == "__main__":
    server = Server(sys.argv[1], FileHandler(sys.argv[2]))
    print(server.start(), flush=True)
    threading.Event().wait()
