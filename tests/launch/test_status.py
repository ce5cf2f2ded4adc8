"""`capo status` tells a run that goes on from one that has ended."""

from pathlib import Path

import pytest

from capo.configs.load import load, to_json
from capo.launch.main import main
from capo.learner.run_file import RunFile


def test_without_a_learner_it_says_how_far_the_run_came(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = {"run_id": "r", "config": to_json(load("quickstart")).decode()}
    run_file = RunFile.create(tmp_path, facts)
    assert main(["status", str(tmp_path)]) == 2  # its learner has not written a status yet
    assert "status.json" in capsys.readouterr().err
    run_file.close()
    assert main(["status", str(tmp_path)]) == 0
    assert "0 of 200 updates are done" in capsys.readouterr().out
    shorter = load("quickstart", ["updates=0"])
    run_file = RunFile.open(tmp_path)
    run_file.set_facts({"config@0": to_json(shorter).decode()})
    evaluation = run_file.begin_evaluation(0, ["greedy"], ["a", "b"])
    run_file.close()
    assert main(["status", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "0 of 0 updates are done, the last evaluation is not. Go on with: capo run" in said
    run_file = RunFile.open(tmp_path)
    run_file.finish_evaluation(evaluation, b"{}")
    run_file.close()
    assert main(["status", str(tmp_path)]) == 0
    assert "The run is complete" in capsys.readouterr().out
