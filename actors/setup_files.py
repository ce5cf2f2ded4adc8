"""Writes the files that a learner sent. No name among them may leave the folder."""

from collections.abc import Mapping
from pathlib import Path

from capo.protocol.errors import ConfigError


def write_files(files: Mapping[str, bytes], folder: Path) -> None:
    """Write name -> content into `folder`, which exists.

    Raises ConfigError for a name that is not plain, before anything is written.
    """
    for name in files:
        if Path(name).name != name or name in ("", ".", "..") or "\0" in name:
            raise ConfigError(f"the learner sent a file named {name!r}, which is not a plain name")
    for name, content in files.items():
        (folder / name).write_bytes(content)
