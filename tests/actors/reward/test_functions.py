import subprocess
import sys
import time
from pathlib import Path

import pytest

from actors.reward import functions
from actors.reward.functions import check_functions, function_names, load_function
from storage.errors import UserError
from tests.actors.reward.conftest import MODULE, options

ROOT = Path(__file__).parents[3]


def test_functions_get_short_unique_names():
    assert function_names(["exact", "a.b.exact", "a.b.exact", "c.length", "x/y.py:score"]) == [
        "exact",
        "a.b.exact",
        "a.b.exact_2",
        "length",
        "score",
    ]


def test_built_in_functions_pass_when_the_data_have_their_columns():
    names = ("!exact", "!numeric", "!partial_credit")
    check_functions(options(*names), ["prompt", "answer"])
    check_functions(options(*names))


def test_own_functions_pass_when_the_data_have_their_columns(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("def score(prompts, completions, label, weight=1.0, **columns):\n    return [weight]\n")
    entry = {"function": f"!{path}:score", "arguments": {"weight": 2.0, "anything": 1}}
    check_functions(options(entry, "length", "asynchronous"), {"label", "answer"})


def test_unknown_built_in_name_suggests_the_nearest():
    with pytest.raises(UserError, match=r"'exct' is neither built in \(exact, numeric.*did you mean 'exact'"):
        check_functions(options("!exct"))


def test_missing_column_is_named_with_function_and_nearest_column():
    with pytest.raises(
        UserError, match=r"exact needs a column 'answer', which the data lack; did you mean 'answers'\?"
    ):
        check_functions(options("!exact"), ["prompt", "answers"])
    with pytest.raises(UserError, match=r"asynchronous needs a column 'answer'.*\(columns: none\)"):
        check_functions(options("asynchronous"), [])


def test_required_parameter_may_come_from_arguments():
    check_functions(options({"function": "!exact", "arguments": {"answer": ["4"]}}), [])


def test_argument_that_the_function_lacks_is_refused():
    with pytest.raises(UserError, match=r"numeric has no parameter 'tolerence'; did you mean 'tolerance'\?"):
        check_functions(options({"function": "!numeric", "arguments": {"tolerence": 0.1}}))
    with pytest.raises(UserError, match="must not set 'completions'"):
        check_functions(options({"function": "length", "arguments": {"completions": []}}))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("!not_there_at_all.f", "there is no module 'not_there_at_all' in the current directory"),
        ("lenght", r"functions_under_test has no 'lenght'; did you mean 'length'\?"),
        ("not_a_function", "this is a int, not a function"),
        ("no_completions", "has no parameter 'completions'; a reward function looks like"),
        ("positional", "parameter 'prompts' cannot be given by name"),
        ("!missing/file.py:f", "there is no file .*missing/file.py"),
        ("!a b.c", "neither built in"),
    ],
)
def test_function_that_cannot_be_used_is_refused_with_the_reason(spec, message):
    with pytest.raises(UserError, match=message):
        check_functions(options(spec))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "import time\ntime.sleep(60)\n",
            r"importing it takes longer than 3 s, it hangs in <module> \(reward.py line 2\)",
        ),
        ("import os\nos._exit(5)\n", "importing it ended the process: it exited with status 5"),
        ("import ctypes\nctypes.string_at(0)\n", "SIGSEGV"),
        ("x = 1\n1 / 0\n", r"ZeroDivisionError: division by zero \(reward.py line 2\)"),
        ("def f(completions:\n", r"SyntaxError"),
        ("raise SystemExit\n", "SystemExit"),
        ("import does_not_exist\n", "No module named 'does_not_exist'"),
        ("def g(completions): ...\n", "has no 'f'"),
    ],
)
def test_file_that_cannot_be_imported_is_refused_with_the_reason(tmp_path, source, message):
    path = tmp_path / "reward.py"
    path.write_text(source)
    started = time.monotonic()
    with pytest.raises(UserError, match=message):
        check_functions(options(f"!{path}:f"), deadline_s=3 if "sleep" in source else 60)
    assert "sleep" not in source or time.monotonic() - started < 30


def test_dependency_missing_inside_a_package_is_not_reported_as_a_missing_package(tmp_path, monkeypatch):
    package = tmp_path / "rewards_pkg"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "scores.py").write_text("import does_not_exist\ndef f(completions): return [1.0]\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UserError, match=r"importing rewards_pkg.scores failed: .*'does_not_exist'"):
        check_functions(options("!rewards_pkg.scores.f"))
    (package / "scores.py").write_text("class Scores:\n    @staticmethod\n    def f(completions): return [1.0]\n")
    check_functions(options("!rewards_pkg.scores.Scores.f"))


def test_file_may_import_its_neighbours_and_printing_does_no_harm(tmp_path):
    (tmp_path / "neighbour_module.py").write_text("VALUE = 1\n")
    path = tmp_path / "reward.py"
    path.write_text("import neighbour_module\nprint('hello')\ndef f(completions): return [neighbour_module.VALUE]\n")
    check_functions(options(f"!{path}:f"))


def test_missing_package_names_the_extra(monkeypatch):
    monkeypatch.setattr(functions.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"math_verify needs the package math-verify; pip install 'slipstream\[math\]'"):
        check_functions(options("!math_verify"))
    with pytest.raises(UserError, match=r"reasoning-gym; pip install 'slipstream\[tasks\]'"):
        check_functions(options("!reasoning_gym"))


def test_modules_are_found_from_the_drivers_directory(tmp_path):
    (tmp_path / "my_rewards.py").write_text("def f(completions): return [1.0]\n")
    script = (
        "import sys\n"
        f"sys.path.append({str(ROOT)!r})\n"
        "from actors.reward.functions import check_functions\n"
        "from actors.reward.options import RewardFunctionOptions, RewardOptions\n"
        "check_functions(RewardOptions(functions=(RewardFunctionOptions(function='my_rewards.f'),)), [])\n"
    )
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True, timeout=30)


def test_loaded_function_scores_in_this_process_too():
    function = load_function(f"{MODULE}.length", {})
    assert function("prompt", "four", {"other": 1}) == 4.0
