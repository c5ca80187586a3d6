"""How large the house is: lines by room, exception handlers, import circles, and what one has to hold in the head.

    python tests/house.py [ROOT]

Lines are those that `wc -l` counts, at the 120 columns of `ruff format`. CI prints this; it is no limit.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path


def main() -> None:
    root = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[1])
    package = root / "src" / "offline_grpo"
    files = sorted(package.rglob("*.py"))
    plugins = sorted((root / "src" / "hydra_plugins").rglob("*.py"))
    rooms = {path.name: sorted(path.rglob("*.py")) for path in sorted(package.iterdir()) if any(path.rglob("*.py"))}
    rooms = {"(root)": sorted(package.glob("*.py")), **rooms, "hydra_plugins": plugins}
    print("source by room:", ", ".join(f"{name} {lines(paths)}" for name, paths in rooms.items()))
    num_lines = lines(files) + lines(plugins)
    print("source, lines:", num_lines)
    folders = {path.name: sorted(path.rglob("*.py")) for path in sorted((root / "tests").iterdir()) if path.is_dir()}
    folders = {"(helpers)": sorted((root / "tests").glob("*.py")), **folders}
    print("tests by folder:", ", ".join(f"{name} {lines(paths)}" for name, paths in folders.items() if paths))
    print("tests, lines:", lines(sorted((root / "tests").rglob("*.py"))))
    pages = [*root.glob("*.md"), *root.glob("docs/*.md"), *root.glob("benchmarks/*.md")]
    print("Markdown, KB:", round(sum(path.stat().st_size for path in pages) / 1000))
    trees = {path: ast.parse(path.read_text()) for path in files}
    handlers = sum(isinstance(node, ast.ExceptHandler) for tree in trees.values() for node in ast.walk(tree))
    print(f"exception handlers: {handlers}, {1000 * handlers / num_lines:.1f} per thousand lines")
    print("import circles:", circles(package, trees) or "none")
    print("Protocol methods:", protocol_methods(trees[package / "interfaces.py"]))
    print("_iterate, lines:", length_of("_iterate", trees[package / "train" / "loop.py"]))


def lines(paths: list[Path]) -> int:
    return sum(len(path.read_text().splitlines()) for path in paths)


def circles(package: Path, trees: dict[Path, ast.Module]) -> list[list[str]]:
    """Groups of modules that import each other, also inside functions, but not for a type checker alone."""
    names = {module_name(package, path): path for path in trees}
    edges = {
        name: {found for found in imported(trees[path]) if found in names} - {name} for name, path in names.items()
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


def imported(tree: ast.Module) -> set[str]:
    only_types = {
        child
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        for child in ast.walk(node)
    }
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import) and node not in only_types:
            found |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom) and node.module and node not in only_types:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def protocol_methods(tree: ast.Module) -> int:
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    return sum(isinstance(node, ast.FunctionDef) for cls in classes for node in cls.body)


def length_of(name: str, tree: ast.Module) -> int | None:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == name and node.end_lineno is not None:
            return node.end_lineno - node.lineno + 1
    return None


if __name__ == "__main__":
    main()
