"""The rules of docs/architecture.md that a program can check: who imports whom."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "offline_grpo"
FILES = sorted(SOURCE.rglob("*.py"))
ROOT_MODULES = {"types", "interfaces", "errors", "settings", "seeding", "progress", "redaction", "hub", "disk"}
COMMANDS = {"__main__", "check", "compare", "evaluate", "export", "model_info", "sample"}
"""`python -m offline_grpo.COMMAND`: reads its words; the work is in a room."""
KNOWS_HYDRA = ("run/",)


def imports(nodes):
    """Dotted names that are imported by these nodes of a syntax tree."""
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def nodes_of(path):
    return list(ast.walk(ast.parse(path.read_text())))


def ours(path):
    return {name.removeprefix("offline_grpo.") for name in imports(nodes_of(path)) if name.startswith("offline_grpo.")}


def relative(path):
    return str(path.relative_to(SOURCE))


def test_types_and_interfaces_stand_on_nothing():
    assert ours(SOURCE / "types.py") == set()
    assert {name.split(".")[0] for name in ours(SOURCE / "interfaces.py")} == {"types"}


def test_nothing_but_words_that_every_room_uses_stands_at_the_root():
    assert {path.stem for path in SOURCE.glob("*.py")} - {"__init__"} == ROOT_MODULES | COMMANDS


def table():
    """Room -> the rooms that it may import, as CONTRIBUTING.md says."""
    rows = re.findall(r"^\| `(\w+)/` \| (.*?) \|", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    return {room: set(re.findall(r"`(\w+)/`", allowed)) for room, allowed in rows}


def test_every_room_is_in_the_table_of_imports():
    rooms = {path.name for path in SOURCE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert table().keys() == rooms - {"run"}


@pytest.mark.parametrize("path", [path for path in FILES if path.parent != SOURCE], ids=relative)
def test_rooms_import_what_the_table_allows(path):
    room = path.relative_to(SOURCE).parts[0]
    found = {name.split(".")[0] for name in ours(path)} - ROOT_MODULES - {room}
    if room != "run":
        assert found <= table()[room], f"{relative(path)} imports {found - table()[room]}"


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_hydra_stops_at_the_door(path):
    if not relative(path).startswith(KNOWS_HYDRA):
        assert not {name for name in imports(nodes_of(path)) if name.split(".")[0] in ("hydra", "omegaconf")}


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_what_takes_seconds_is_imported_where_it_is_needed(path):
    """A default run needs none of these, and each of its starts would wait for them."""
    at_import = [node for node in ast.parse(path.read_text()).body if isinstance(node, (ast.Import, ast.ImportFrom))]
    names = {name.split(".")[0] for name in imports(at_import)}
    of_vllm = (
        f"engine/inside_vllm/offline_grpo_{name}.py" for name in ("generate", "scheduler")
    )  # only vLLM's own processes import them
    allowed = {module: {"vllm"} for module in of_vllm} | {
        "model/lora_layer.py": {"peft"}
    }  # the latter is for models with adapters
    assert names & {"peft", "bitsandbytes", "wandb", "tensorboard", "vllm"} <= allowed.get(relative(path), set())


ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()
STEPS = re.findall(
    r"^(.*?)\s(\w[\w/]*\.py) ([\w.]+)$", ARCHITECTURE.partition("```text\n")[2].partition("```")[0], re.MULTILINE
)


def defined(path):
    """Qualified names of the functions, classes and methods in a file."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{method.name}" for method in node.body if isinstance(method, ast.FunctionDef)}
    return found


def test_the_algorithm_is_told_in_forty_lines():
    block = ARCHITECTURE.partition("```text\n")[2].partition("```")[0]
    code = [line for line in block.splitlines() if line.strip() and not line.strip().startswith("#")]
    assert len(STEPS) > 25
    assert len(code) <= 40


@pytest.mark.parametrize(("code", "file", "name"), STEPS)
def test_the_algorithm_names_functions_that_exist(code, file, name):
    assert name in defined(SOURCE / file), f"{file} has no {name}"
    called = name.rpartition(".")[2].lstrip("_").removeprefix("iterate") or "iterate"
    assert called in code or name == "MasterWeights", f"{called} is not what the line calls: {code.strip()}"


@pytest.mark.parametrize(
    "room", sorted(path.name for path in SOURCE.iterdir() if path.is_dir() and path.name != "__pycache__")
)
def test_every_file_has_its_place_on_the_page(room):
    row = next(line for line in ARCHITECTURE.splitlines() if line.startswith(f"| `{room}/` |"))
    for path in (SOURCE / room).glob("*.py"):
        assert path.stem == "__init__" or path.stem in row, f"{room}/{path.name} is missing"
