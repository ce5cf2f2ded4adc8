"""The README tells the truth about files and commands."""

import ast
import asyncio
import re
import subprocess
import sys
from pathlib import Path

import pytest

from capo.actors.blocking import make_env
from capo.envs.api import Action, Transition
from capo.envs.registry import load_factory

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PACKAGES = ("protocol", "configs", "envs", "envs/alfworld", "actors", "learner", "launch")


def listed() -> set[str]:
    """What the tree of files names, as folder/file."""
    found, folder = set(), ""
    for line in README.split("## Where things are", 1)[1].splitlines():
        if match := re.match(r"([a-z/]+)/ ", line):
            folder = match[1]
        elif match := re.match(r"  ([a-z0-9_]+\.(?:py|toml)) ", line):
            found.add(f"{folder}/{match[1]}")
    return found


def test_the_tree_names_every_module_and_nothing_else() -> None:
    there = {
        f"{folder}/{file.name}"
        for folder in (*PACKAGES, "benchmarks")
        for file in (ROOT / folder).iterdir()
        if file.suffix in (".py", ".toml") and file.name != "__init__.py"
    }
    assert listed() == there


@pytest.mark.parametrize("package", PACKAGES)
def test_every_module_says_what_it_does(package: str) -> None:
    for file in (ROOT / package).glob("*.py"):
        assert ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))), file


def test_every_command_of_the_readme_is_one() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "capo.launch.main", "--help"],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    found = re.findall(r"^capo ([a-z]+)|`capo ([a-z]+)", README, flags=re.MULTILINE)
    commands = {"".join(one) for one in found}
    assert {"run", "learner", "actor", "replay", "report"} <= commands
    for command in commands:
        assert re.search(rf"^ +{command}\b", done.stdout, flags=re.MULTILINE), command


def test_the_environment_of_the_readme_works(tmp_path, monkeypatch) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    (tmp_path / "letters.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    factory = load_factory("letters:Letters", {})
    env = make_env(factory.make)

    async def play() -> Transition:
        await env.reset(factory.tasks("train")[0], 0)
        return await env.step(Action(text=" 3\n"))

    assert asyncio.run(play()).outcome == 1.0


def test_every_link_leads_somewhere() -> None:
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (ROOT / target).exists(), target


def test_every_make_target_of_the_readme_is_one() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in set(re.findall(r"^make ([a-z0-9]+)|`make ([a-z0-9]+)`", README, re.MULTILINE)):
        target = "".join(target)
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target
