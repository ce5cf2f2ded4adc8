import sys
import types

import msgspec
import pytest

from capo.envs.registry import load_factory, nearest, read_options
from capo.protocol.errors import ConfigError


class Options(msgspec.Struct, forbid_unknown_fields=True):
    colour: str = "red"
    size: int = 1


class Factory:
    def __init__(self, options):
        self.options = options

    def tasks(self, split):
        return []

    def make(self):
        return None


@pytest.fixture
def module(monkeypatch):
    made = types.ModuleType("house_of_tests")
    monkeypatch.setitem(sys.modules, "house_of_tests", made)
    return made


def test_a_factory_gets_the_options_it_was_named_with(module):
    module.make = Factory
    assert load_factory("house_of_tests:make", {"size": 2}).options == {"size": 2}


@pytest.mark.parametrize("name", ["capo.envs.household", ":make", "capo.envs.household:"])
def test_a_name_that_is_not_module_and_name_is_explained(name):
    with pytest.raises(ConfigError, match="write it as module:name"):
        load_factory(name, {})


@pytest.mark.parametrize("name", ["capo.envs.househld:make", "no_such_package.at_all:make"])
def test_a_missing_module_is_named(name):
    with pytest.raises(
        ConfigError, match=r"there is no module '(capo\.envs\.househld|no_such_package)'"
    ):
        load_factory(name, {})


def test_a_package_that_the_module_needs_is_told_from_the_module_itself(tmp_path, monkeypatch):
    (tmp_path / "needs_something.py").write_text("import something_not_installed\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="needs the package 'something_not_installed'"):
        load_factory("needs_something:make", {})


def test_a_missing_attribute_is_refused_with_the_nearest_one():
    with pytest.raises(ConfigError, match="has no 'mke'; did you mean 'make'"):
        load_factory("capo.envs.household:mke", {})


def refuse_to_be_called(options):
    raise AssertionError("it was called")


def promise(options) -> Factory:
    return {}


@pytest.mark.parametrize("maker", [("not", "callable"), dict, refuse_to_be_called])
def test_what_does_not_say_that_it_makes_environments_is_not_called(module, maker):
    module.make = maker
    with pytest.raises(ConfigError, match=r"not called: it must be a class with tasks\(\)"):
        load_factory("house_of_tests:make", {})


def test_our_own_factories_are_what_they_have_to_be():
    assert load_factory("capo.envs.household:make", {}).tasks("test")
    assert load_factory("tests.chaos.world:make", {}).tasks("test")


def test_annotations_may_be_text(tmp_path, monkeypatch):
    (tmp_path / "later_annotations.py").write_text(
        "from __future__ import annotations\n"
        "class Factory:\n    def tasks(self, split): return [1]\n    def make(self): ...\n"
        "def make(options: Unknown | None = None) -> Factory: return Factory()\n"
        "def right(options: dict) -> Factory: return Factory()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert load_factory("later_annotations:right", {}).tasks("test") == [1]
    with pytest.raises(ConfigError, match="not called"):
        load_factory("later_annotations:make", {})


def test_a_function_that_breaks_its_promise_is_refused(module):
    module.make = promise
    with pytest.raises(ConfigError, match=r"returned a dict without tasks\(\)"):
        load_factory("house_of_tests:make", {})


def test_an_unknown_option_is_refused_with_the_nearest_one():
    with pytest.raises(ConfigError, match="no key 'color'; did you mean 'colour'"):
        read_options({"color": "blue"}, Options)


def test_an_option_of_the_wrong_type_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"Expected `int`, got `str` at `environment.options.si"):
        read_options({"size": "large"}, Options)


def test_a_name_like_no_other_gets_the_list_to_choose_from():
    assert nearest("xyzzy", ["size", "colour"]) == "; it has colour, size"
    assert nearest("xyzzy", []) == ""


@pytest.mark.parametrize(
    ("code", "name", "complaint"),
    [
        ("def make(options: x", "make", "cannot be imported: SyntaxError"),
        ("1 / 0", "make", "cannot be imported: ZeroDivisionError"),
        (
            "class Make:\n    def tasks(self): ...\n    def make(self): ...",
            "Make",
            "could not be called with its options: TypeError",
        ),
    ],
)
def test_a_module_that_does_not_work_is_one_sentence(
    tmp_path, monkeypatch, code: str, name: str, complaint: str
) -> None:
    module = f"module_{abs(hash(code))}"
    (tmp_path / f"{module}.py").write_text(code)
    monkeypatch.chdir(tmp_path)  # the current folder is looked in
    with pytest.raises(ConfigError, match=complaint):
        load_factory(f"{module}:{name}", {})
