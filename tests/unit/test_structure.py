"""The rules of docs/architecture.md that a program can check: who imports whom."""

import ast
import re
from functools import cache
from pathlib import Path

import house

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "offline_grpo"
FILES = sorted(SOURCE.rglob("*.py"))
ROOT_MODULES = {
    "installed",
    "types",
    "interfaces",
    "errors",
    "settings",
    "seeding",
    "progress",
    "redaction",
    "hub",
    "disk",
    "formats",
    "sandbox",
}
LIFE = {"run", "state", "loop"}
COMMANDS = {"__main__", "check", "compare", "evaluate", "export", "model_info", "play", "sample", "score"}
"""`python -m offline_grpo.COMMAND`: reads its words; the work is in a room."""
TOGETHER = {"config", "history", "start", "commands", *LIFE}
"""Rooms and modules that put all others together."""
KNOWS_HYDRA = ("config/", "history/", "commands/", "run.py")


def imports(nodes):
    """Dotted names that are imported by these nodes of a syntax tree."""
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@cache
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
    assert {path.stem for path in SOURCE.glob("*.py")} - {"__init__"} == ROOT_MODULES | LIFE | COMMANDS


def table():
    """Room -> the rooms that it may import, as CONTRIBUTING.md says."""
    rows = re.findall(r"^\| `(\w+)/` \| (.*?) \|", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    return {room: set(re.findall(r"`(\w+)/`", allowed)) for room, allowed in rows}


def test_every_room_is_in_the_table_of_imports():
    rooms = {path.name for path in SOURCE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert table().keys() == rooms - TOGETHER


def test_rooms_import_what_the_table_allows():
    for path in FILES:
        room = path.relative_to(SOURCE).parts[0]
        if path.parent != SOURCE and room not in TOGETHER:
            found = {name.split(".")[0] for name in ours(path)} - ROOT_MODULES - {room}
            assert found <= table()[room], f"{relative(path)} imports {found - table()[room]}"


def test_settings_become_parts_without_a_run():
    for path in (SOURCE / "config").glob("*.py"):
        assert not {name.split(".")[0] for name in ours(path)} & (TOGETHER - {"config"}), relative(path)


def test_hydra_stops_at_the_door():
    outside = [path for path in FILES if not relative(path).startswith(KNOWS_HYDRA)]
    hydra = {"hydra", "omegaconf"}
    assert not [path for path in outside if {name.split(".")[0] for name in imports(nodes_of(path))} & hydra]


def test_slow_packages_are_imported_where_they_are_needed():
    """A default run needs none of these, and each of its starts would wait for them."""
    of_vllm = (f"engine/inside_vllm/offline_grpo_{name}.py" for name in ("generate", "scheduler"))
    allowed = {module: {"vllm"} for module in of_vllm}  # only vLLM's own processes import them
    allowed["model/lora_layer.py"] = {"peft"}  # for models with adapters
    slow = {"peft", "bitsandbytes", "wandb", "tensorboard", "vllm"}
    for path in FILES:
        at_import = [
            node for node in ast.parse(path.read_text()).body if isinstance(node, (ast.Import, ast.ImportFrom))
        ]
        names = {name.split(".")[0] for name in imports(at_import)}
        assert names & slow <= allowed.get(relative(path), set()), relative(path)


def test_servers_begin_before_transformers_is_imported():
    """It takes seconds, as DTensors do, which a server needs as well: they pass side by side."""
    waiting, seen = [SOURCE / "start" / "servers.py", *(SOURCE / "weight_sync").glob("*.py")], set()
    while waiting:
        path = waiting.pop()
        seen.add(path)
        names = imports(ast.parse(path.read_text()).body)
        slow = [
            name for name in names if re.match(r"(transformers|accelerate|peft|torch\.distributed\.tensor)\b", name)
        ]
        assert slow == [] or path == SOURCE / "placement" / "ranks.py", relative(path)  # imported before the run is
        files = {ROOT / "src" / f"{name.replace('.', '/')}{end}" for name in names for end in (".py", "/__init__.py")}
        waiting += files.intersection(FILES) - seen
    assert SOURCE / "engine" / "server_engine.py" in seen


def test_no_module_imports_itself_in_a_circle():
    """Nor for a type checker."""
    modules = [house.Module.read(path) for path in FILES]
    assert house.circles(SOURCE, modules, with_types=False) == []
    assert house.circles(SOURCE, modules, with_types=True) == []


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


def test_the_algorithm_names_functions_that_exist():
    for code, file, name in STEPS:
        assert name in defined(SOURCE / file), f"{file} has no {name}"
        called = name.rpartition(".")[2].lstrip("_").removeprefix("iterate") or "iterate"
        assert called in code or name == "MasterWeights", f"{called} is not what the line calls: {code.strip()}"


def test_every_room_is_on_the_page_with_files_that_it_has():
    rows = {match[1]: match[2] for match in re.finditer(r"^\| `(\w+)/` \|(.*)$", ARCHITECTURE, re.MULTILINE)}
    assert rows.keys() >= {path.parent.name for path in FILES if path.parent.parent == SOURCE}
    for room, row in rows.items():
        for name in re.findall(r"`([\w/]+\.py)`", row):
            assert (SOURCE / room / name).exists(), f"{room}/{name}"
