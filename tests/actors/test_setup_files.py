"""Files from a learner stay in their folder."""

from pathlib import Path

import pytest

from capo.actors.setup_files import write_files
from capo.protocol.errors import ConfigError


def test_files_are_written_as_they_came(tmp_path: Path) -> None:
    files = {"config.json": b"{}", "a.b c": b"\x00"}
    write_files(files, tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == files


@pytest.mark.parametrize("name", ["../evil", "/tmp/evil", "a/b", "a/", "", ".", "..", "a\0b"])
def test_a_name_that_is_not_plain_is_refused_before_anything_is_written(tmp_path, name) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    with pytest.raises(ConfigError, match="not a plain name"):
        write_files({"config.json": b"{}", name: b"x"}, folder)
    assert list(tmp_path.rglob("*")) == [folder]
