"""The house rules of CONTRIBUTING.md, checked over the source text."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 70
MAX_POSITIONAL = 3
# Signatures that a library prescribes: the file, the function and whose it is.
PRESCRIBED_SIGNATURES = {
    ("src/hybridasync/worker/attention.py", "forward"): "megatron-core's core attention",
    ("src/hybridasync/worker/logprobs.py", "forward"): "torch.autograd.Function.apply knows no keywords",
    ("src/hybridasync/engine/unpickle.py", "_rebuild_tensor"): "a pickle of torch calls it by position",
}
# Threads share state, so a process has them in one file at most.
THREADS_IN = {
    "src/hybridasync/transport/rpc.py": "the controller: calls of torch that block for good must not hold the loop",
    "src/hybridasync/engine/loop.py": "the embedded engine, a process of its own: the decoder beside its HTTP server",
}

Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def repository_files() -> tuple[Path, ...]:
    """Tracked files and new ones that git doesn't ignore."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    if done.returncode != 0:
        pytest.skip(reason="not a git checkout: the list of files is git's")
    paths = (ROOT / name.decode() for name in done.stdout.split(b"\0") if name)
    return tuple(sorted(path for path in paths if path.is_file()))


def python_files(*folders: str) -> list[Path]:
    return [path for path in repository_files() if path.suffix == ".py" and path.relative_to(ROOT).parts[0] in folders]


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def functions(path: Path) -> Iterator[Function]:
    return (node for node in ast.walk(tree_of(path)) if isinstance(node, Function))


def calls(path: Path) -> Iterator[tuple[str, ast.Call]]:
    """The dotted name of each call, as written."""
    return ((ast.unparse(node.func), node) for node in ast.walk(tree_of(path)) if isinstance(node, ast.Call))


def place(path: Path, node: ast.AST | None = None) -> str:
    return f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}"


def test_files_stay_short() -> None:
    """A source file has fewer than 500 lines."""
    lengths = {place(path): len(path.read_bytes().splitlines()) for path in python_files("src", "cli")}
    assert {where: lines for where, lines in lengths.items() if lines >= MAX_FILE_LINES} == {}


def test_functions_stay_short() -> None:
    """A function has fewer than 70 lines, its docstring included."""
    long = [
        f"{place(path, node)} {node.name}: {lines} lines"
        for path in python_files("src", "cli")
        for node in functions(path)
        if (lines := (node.end_lineno or node.lineno) - node.lineno + 1) >= MAX_FUNCTION_LINES
    ]
    assert long == []


def test_few_parameters_are_positional() -> None:
    """At most three parameters may be given by position; what a library prescribes is listed above."""
    many = []
    for path in python_files("src", "cli"):
        for node in functions(path):
            names = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args)]
            names = names[1:] if names and names[0] in ("self", "cls", "ctx") else names
            prescribed = (str(path.relative_to(ROOT)), node.name) in PRESCRIBED_SIGNATURES
            if len(names) > MAX_POSITIONAL and not prescribed:
                many.append(f"{place(path, node)} {node.name}({', '.join(names)})")
    assert many == []


def _banned(name: str, call: ast.Call, *, in_drivers: bool) -> str | None:
    """Why a call isn't allowed."""
    keywords = {keyword.arg: keyword.value for keyword in call.keywords}
    shell = keywords.get("shell")
    receiver, _, method = name.rpartition(".")
    owner = receiver.rpartition(".")[2]
    rules: tuple[tuple[bool, str], ...] = (
        (method in ("create_task", "ensure_future"), "all tasks live in the task group opened in app.py"),
        (method == "cancel" and bool(re.search(r"task|future", owner, re.I)), "cancel scopes, not tasks"),
        (name == "time.sleep" and in_drivers, "drivers wait with anyio"),
        (name in ("print", "builtins.print"), "use the event log or the progress display"),
        (name in ("os.system", "os.popen"), "start processes with a list of arguments"),
        (isinstance(shell, ast.Constant) and shell.value is True, "start processes with a list of arguments"),
        (name in ("eval", "exec"), "no evaluation of text"),
    )
    return next((reason for broken, reason in rules if broken), None)


def test_banned_calls_are_not_made() -> None:
    """No free tasks, no sleeping drivers, no print, no shell."""
    found = [
        f"{place(path, call)} {name}: {reason}"
        for path in python_files("src", "cli")
        for name, call in calls(path)
        if (reason := _banned(name, call, in_drivers="drivers" in path.parts))
    ]
    assert found == []


def test_threads_are_made_where_the_list_says() -> None:
    """A process makes threads in one file at most: everywhere else state has one owner and no locks."""
    made = {
        str(path.relative_to(ROOT))
        for path in python_files("src", "cli")
        for name, _ in calls(path)
        if name in ("threading.Thread", "Thread", "ThreadPoolExecutor", "futures.ThreadPoolExecutor")
    }
    assert made <= THREADS_IN.keys()


def test_nothing_is_asserted_or_left_open_in_source() -> None:
    """Source has no assert (python -O drops it), no NotImplementedError, and no marks of unfinished work."""
    marks = re.compile(r"\b(TO" r"DO|FIX" r"ME|XX" r"X|HA" r"CK)\b")
    found = [
        place(path, node)
        for path in python_files("src", "cli")
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Assert) or (isinstance(node, ast.Name) and node.id == "NotImplementedError")
    ]
    found += [
        f"{path.relative_to(ROOT)}:{number}"
        for path in python_files("src", "cli", "tests", "benchmarks")
        for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1)
        if marks.search(line)
    ]
    assert found == []


def test_r127_benchmark_data_and_results_are_not_packaged() -> None:
    """R127: a wheel has the two packages and the recipes: nothing of benchmarks/, no table, log or archive."""
    build = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"]["build"]["targets"]
    assert build["wheel"]["packages"] == ["src/hybridasync", "cli/hybridasync_cli"]
    assert list(build["wheel"]["force-include"]) == ["recipes"]
    shipped = [path for place in ("src", "cli", "recipes") for path in (ROOT / place).rglob("*") if path.is_file()]
    assert [path for path in shipped if path.suffix in {".csv", ".gz", ".jsonl", ".svg", ".safetensors"}] == []


def test_every_module_says_what_it_is_for() -> None:
    """A source module begins with a docstring."""
    silent = [place(path) for path in python_files("src", "cli") if not ast.get_docstring(tree_of(path))]
    assert silent == []


# In pieces, so that this file doesn't hold what it looks for.
_FOREIGN = re.compile(
    "|".join(
        (
            r"(?<![\w./{}-])/" r"(?:work|root)/\w",
            r"(?<![\w.])/" r"home/\w",
            r"/opt/" r"(?:pypi|wheels)",
            r"pypi" r"\.org|files\.python" r"hosted|download\.py" r"torch\.org",
            r"\bcl" r"aude\b|\banth" r"ropic\b",
        )
    ),
    re.IGNORECASE,
)


def test_no_file_names_a_machine_or_a_registry() -> None:
    """Nothing in the repository depends on where it was written: no home directories, no package hosts."""
    found = []
    for path in repository_files():
        for number, line in enumerate(path.read_bytes().decode("utf-8", "replace").split("\n"), 1):
            if match := _FOREIGN.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number} {match.group()}")
    assert found == []


def test_every_dependency_has_its_reason() -> None:
    """docs/dependencies.md has one line for each dependency of pyproject.toml, of the extras too, and no other."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [
        *project["dependencies"],
        *(name for extra in project["optional-dependencies"].values() for name in extra),
    ]
    names = {re.split(r"[\[<>=]", requirement)[0] for requirement in wanted} - {"hybridasync"}
    table = (ROOT / "docs" / "dependencies.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `([^`]+)` \| .", table, re.MULTILINE)) == names


def test_integration_runs_the_command_of_the_readme() -> None:
    """.ci/run calls what README.md tells people to call, and every document that a document links to is there."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "\nbash tests/run.sh\n" in readme
    assert "bash tests/run.sh" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    missing = [
        f"{path.relative_to(ROOT)}: {target}"
        for path in repository_files()
        if path.suffix == ".md"
        for target in re.findall(r"\]\(([^)#:]+)[^):]*\)", path.read_text(encoding="utf-8"))
        if not (path.parent / target).exists()
    ]
    assert missing == []


def _tests(path: Path) -> Iterator[Function]:
    return (node for node in functions(path) if node.name.startswith("test_"))


def _checks_something(test: Function) -> bool:
    """An assertion, an expected exception, or a call of a helper whose name says that it checks."""
    for node in ast.walk(test):
        if isinstance(node, ast.Assert):
            return True
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func).rpartition(".")[2]
            if re.match(r"(raises|warns|fail)$|_?(assert|check|expect|verify)", name):
                return True
    return False


def test_tests_are_where_pytest_finds_them() -> None:
    """R128: a file with tests is called test_*.py."""
    hidden = [
        place(path)
        for path in python_files("tests")
        if not path.name.startswith("test_") and any(True for _ in _tests(path))
    ]
    assert hidden == []


@pytest.mark.parametrize(
    ("rule", "keeps"),
    [("docstring", lambda test: bool(ast.get_docstring(test))), ("assertion", _checks_something)],
)
def test_every_test_promises_and_checks(rule: str, keeps: Callable[[Function], bool]) -> None:
    """Each test has a docstring (one promise) and an assertion."""
    without = [
        f"{place(path, test)} {test.name}" for path in python_files("tests") for test in _tests(path) if not keeps(test)
    ]
    assert without == [], f"without {rule}"


def test_a_skipped_test_says_why() -> None:
    """R128: every skip, skipif, xfail and importorskip has a reason."""
    silent = []
    for path in python_files("tests"):
        for name, call in calls(path):
            short = name.rpartition(".")[2]
            reasons = [keyword for keyword in call.keywords if keyword.arg == "reason"]
            by_position = short == "skip" and bool(call.args)
            if short in ("skip", "skipif", "xfail", "importorskip") and not reasons and not by_position:
                silent.append(f"{place(path, call)} {name}")
    assert silent == []


def test_layers_hold() -> None:
    """import-linter's contracts: a layer imports only lower ones, the core only the standard library."""
    program = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([str(program)], cwd=ROOT, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
