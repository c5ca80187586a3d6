"""How large the house is, and how it reads: lines by room, functions, comments, handlers, import circles.

    python tests/house.py [ROOT]

Lines are those that `wc -l` counts, at the 120 columns of `ruff format`; code lines are those without blank ones,
comments, docstrings and imports. CI prints this; it is no limit. It needs nothing but Python.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import Counter
from pathlib import Path
from statistics import median
from typing import NamedTuple

Function = ast.FunctionDef | ast.AsyncFunctionDef
MUTABLE = (ast.Dict, ast.List, ast.Set, ast.DictComp, ast.ListComp, ast.SetComp)


def main() -> None:
    root = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[1])
    package = root / "src" / "offline_grpo"
    plugins = sorted((root / "src" / "hydra_plugins").rglob("*.py"))
    rooms = {path.name: sorted(path.rglob("*.py")) for path in sorted(package.iterdir()) if any(path.rglob("*.py"))}
    rooms = {"(root)": sorted(package.glob("*.py")), **rooms, "hydra_plugins": plugins}
    modules = [Module.read(path) for paths in rooms.values() for path in paths]
    num_lines = sum(len(module.lines) for module in modules)
    print("source by room:", ", ".join(f"{name} {lines(paths)}" for name, paths in rooms.items()))
    print(f"source: {num_lines} lines, {len(modules)} files, lines of code {sum(m.num_code_lines for m in modules)}")
    print_how_it_reads(modules, num_lines)
    for name, with_types in (("import circles", False), ("import circles with types", True)):
        print(f"{name}:", circles(package, modules, with_types=with_types) or "none")
    print("Protocols with one implementation:", ", ".join(lone_protocols(modules)) or "none")
    print("process-wide mutable state:", ", ".join(process_wide(modules)) or "none")
    folders = {path.name: sorted(path.rglob("*.py")) for path in sorted((root / "tests").iterdir()) if path.is_dir()}
    folders = {"(helpers)": sorted((root / "tests").glob("*.py")), **folders}
    print("tests by folder:", ", ".join(f"{name} {lines(paths)}" for name, paths in folders.items() if paths))
    print("tests, lines:", lines(sorted((root / "tests").rglob("*.py"))))
    print("benchmarks, lines:", lines(sorted((root / "benchmarks").rglob("*.py"))))
    print("conf, lines:", lines(sorted((root / "conf").rglob("*.yaml"))))
    pages = [*root.glob("*.md"), *root.glob("docs/*.md"), *root.glob("benchmarks/*.md")]
    print(f"Markdown, KB: {sum(path.stat().st_size for path in pages) / 1000:.0f}")
    print("README, bytes:", (root / "README.md").stat().st_size)


class Module(NamedTuple):
    """A file of the source."""

    path: Path
    lines: list[str]
    tree: ast.Module
    comments: list[int]  # lines that are a comment and nothing else

    @classmethod
    def read(cls, path: Path) -> Module:
        text = path.read_text()
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        alone = (token for token in tokens if token.type == tokenize.COMMENT and token.line.strip().startswith("#"))
        return cls(path, text.splitlines(), ast.parse(text), [token.start[0] for token in alone])

    @property
    def functions(self) -> list[Function]:
        return [node for node in ast.walk(self.tree) if isinstance(node, Function)]

    @property
    def num_code_lines(self) -> int:
        others = set(self.comments) | {n for n, line in enumerate(self.lines, 1) if not line.strip()}
        for node in ast.walk(self.tree):
            is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            if is_docstring or isinstance(node, ast.Import | ast.ImportFrom):
                others |= {*range(node.lineno, (node.end_lineno or node.lineno) + 1)}
        return len(self.lines) - len(others)


def print_how_it_reads(modules: list[Module], num_lines: int) -> None:
    functions = [each for module in modules for each in module.functions]
    per_code = 1000 / sum(module.num_code_lines for module in modules)
    length = median((each.end_lineno or 0) - each.lineno + 1 for each in functions)
    count = len(functions)
    print(f"functions: {count}, {count * per_code:.0f} per 1,000 lines of code, median {length:.0f} lines")
    once = used_once(modules)
    print(f"private functions that one place uses: {len(once)}")
    comments = sum(len(module.comments) for module in modules)
    print(f"standalone comments: {comments}, {1000 * comments / num_lines:.1f} per 1,000 lines")
    handlers = sum(isinstance(node, ast.ExceptHandler) for module in modules for node in ast.walk(module.tree))
    print(f"exception handlers: {handlers}, {1000 * handlers / num_lines:.1f} per 1,000 lines")
    print("signatures with Any:", sum(has_any(each) for each in functions))


def used_once(modules: list[Module]) -> list[str]:
    """Private functions whose name the source has twice: where it is defined, and where it is used."""
    names = Counter(
        node.id if isinstance(node, ast.Name) else node.attr
        for module in modules
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Name | ast.Attribute)
    )
    private = (each.name for module in modules for each in module.functions if each.name.startswith("_"))
    return [name for name in private if names[name] == 1]


def has_any(function: Function) -> bool:
    arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    types = [argument.annotation for argument in arguments] + [function.returns]
    names = (node for each in types if each is not None for node in ast.walk(each))
    return any(isinstance(node, ast.Name) and node.id == "Any" for node in names)


def lone_protocols(modules: list[Module]) -> list[str]:
    """Protocols that one class has all methods of, its own or inherited ones, or none."""
    nodes = [node for module in modules for node in ast.walk(module.tree) if isinstance(node, ast.ClassDef)]
    classes = {node.name: node for node in nodes}

    def members(name: str) -> set[str]:
        node = classes.get(name)
        if node is None:
            return set()
        own = {each.name for each in ast.walk(node) if isinstance(each, Function)}
        stored = (each for each in ast.walk(node) if isinstance(getattr(each, "ctx", None), ast.Store))
        own |= {each.id if isinstance(each, ast.Name) else getattr(each, "attr", "") for each in stored}
        return own.union(*(members(ast.unparse(base).partition("[")[0]) for base in node.bases))

    protocols = {node.name for node in nodes if any(ast.unparse(base).startswith("Protocol") for base in node.bases)}
    found = {
        name: {method for method in members(name) if not method.startswith("__")} or {"__call__"} for name in protocols
    }
    have = {name: members(name) for name in classes.keys() - protocols}
    return sorted(name for name, needs in found.items() if sum(needs <= own for own in have.values()) < 2)


def process_wide(modules: list[Module]) -> list[str]:
    """Variables of modules that functions change: rebound by `global`, or lower-case containers."""
    found = []
    for module in modules:
        changed = {name for node in ast.walk(module.tree) if isinstance(node, ast.Global) for name in node.names}
        for node in module.tree.body:
            targets = (
                node.targets
                if isinstance(node, ast.Assign)
                else [node.target]
                if isinstance(node, ast.AnnAssign)
                else []
            )
            for name in (target.id for target in targets if isinstance(target, ast.Name)):
                value = getattr(node, "value", None)
                if name in changed or (isinstance(value, MUTABLE) and name.islower() and not name.startswith("__")):
                    found.append(f"{module.path.stem}.{name}")
    return found


def lines(paths: list[Path]) -> int:
    return sum(len(path.read_text().splitlines()) for path in paths)


def circles(package: Path, modules: list[Module], *, with_types: bool) -> list[list[str]]:
    """Groups of modules that import each other, also inside functions; for a type checker alone if `with_types`."""
    trees = {module_name(package, module.path): module.tree for module in modules}
    edges = {
        name: {found for found in imported(tree, with_types=with_types) if found in trees} - {name}
        for name, tree in trees.items()
    }
    reach: dict[str, set[str]] = {}
    for name in edges:
        seen, queue = set(), [name]
        while queue:
            fresh = edges[queue.pop()] - seen
            seen |= fresh
            queue.extend(fresh)
        reach[name] = seen
    groups = {tuple(sorted(b for b in reach[a] if a in reach[b])) for a in edges if a in reach[a]}
    return [list(group) for group in sorted(groups)]


def module_name(package: Path, path: Path) -> str:
    relative = path.relative_to(package.parent).with_suffix("")
    return ".".join(relative.parts[:-1] if relative.name == "__init__" else relative.parts)


def imported(tree: ast.Module, *, with_types: bool) -> set[str]:
    only_types = {
        child
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING") and not with_types
        for child in ast.walk(node)
    }
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import) and node not in only_types:
            found |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom) and node.module and node not in only_types:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


if __name__ == "__main__":
    main()
