"""Who may import whom (docs/architecture.md), read from the sources, and what stays light."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ALLOWED = {
    "protocol": {"protocol"},
    "configs": {"configs"},
    "envs": {"envs", "protocol"},
    "actors": {"actors", "protocol", "configs", "envs"},
    "learner": {"learner", "protocol", "configs"},
    "launch": {"launch", "actors", "learner", "protocol", "configs", "envs"},
}


def modules(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def imported_names(file: Path) -> list[str]:
    names = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


@pytest.mark.parametrize("package", sorted(ALLOWED))
def test_a_package_imports_only_what_it_may(package: str) -> None:
    assert modules(package), f"{package} has no modules"
    for file in modules(package):
        for name in imported_names(file):
            if name.startswith("capo."):
                assert name.split(".")[1] in ALLOWED[package], f"{file.name} imports {name}"


@pytest.mark.parametrize("package", sorted(ALLOWED))
def test_vllm_is_imported_only_in_the_actors_vllm_modules_or_the_nccl_sender(package: str) -> None:
    for file in modules(package):
        if any(name.split(".")[0] == "vllm" for name in imported_names(file)):
            assert file.name.startswith("vllm_") or file.name == "weight_transfer_nccl.py", file


@pytest.mark.parametrize("package", sorted(ALLOWED))
def test_nothing_imports_pickle(package: str) -> None:
    for file in modules(package):
        for name in imported_names(file):
            assert name.split(".")[0] not in {"pickle", "cloudpickle", "dill", "shelve", "marshal"}


@pytest.mark.parametrize(
    "arguments", [["--help"], ["check", "configs/quickstart.toml"], ["learner", "--help"]]
)
def test_light_commands_import_neither_torch_nor_vllm(arguments: list[str]) -> None:
    script = (
        "import sys\n"
        "from capo.launch.main import main\n"
        "try:\n"
        "    code = main(sys.argv[1:])\n"
        "except SystemExit as exit:\n"
        "    code = exit.code\n"
        "heavy = {'torch', 'vllm', 'transformers', 'deepspeed'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "assert code == 0, code\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
