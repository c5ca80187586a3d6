"""What mkdocs.yml adds to MkDocs: pages lie in the site as in the repository, so that their links work in both."""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from offline_grpo.config.compose import folder, groups
from offline_grpo.config.help import help_text, keys

ROOT = Path(__file__).parents[1]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/*.md")]
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)[^)#\s]+")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """All pages, all files that they link to, and a page for each group of settings."""
    linked = {(page.parent / place).resolve() for page in PAGES for place in LINK.findall(page.read_text())}
    found = [each for each in files if each.src_dir != config.docs_dir]  # of the theme
    for path in sorted({*PAGES, *(path for path in linked if path.is_file())}):
        found.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    conf = folder()
    names = list(groups([conf]))
    top = help_text([conf], [key.name for key in keys(conf / "config.yaml", "")])
    rows = "\n".join(f"- [{name}]({name}/README.md)" for name in names)
    about = "Each group of `conf/` has options, and each option keys, as `--help` explains them."
    text = f"# Settings\n\n{about}\n\n{rows}\n\n```text\n{top}\n```\n"
    found.append(File.generated(config, "conf/README.md", content=text))
    for name in names:
        text = f"# {name}\n\n```text\n{help_text([conf], [name])}\n```\n"
        found.append(File.generated(config, f"conf/{name}/README.md", content=text))
    return Files(found)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links to folders lead to their pages."""
    here = (ROOT / page.file.src_uri).parent
    return LINK.sub(lambda link: f"{link[0]}/README.md" if (here / link[0]).is_dir() else link[0], markdown)
