"""What the site has beyond the files of docs/: the reference, a page a module, and links that leave docs/."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import recompute

ROOT = Path(__file__).resolve().parent.parent


def modules() -> list[str]:
    """The public modules: of the library, then of the adapters. A folder or a file without an underscore is public."""
    core = ROOT / "recompute"
    own = [path.stem for path in sorted(core.glob("*.py")) if not path.stem.startswith("_")]
    packages = [path.parent.name for path in sorted(core.glob("*/__init__.py")) if not path.parent.name.startswith("_")]
    adapters = [path.parent.name for path in sorted((ROOT / "adapters").glob("*/__init__.py"))]
    return ["recompute", *(f"recompute.{name}" for name in sorted(own + packages)), *adapters]


def taught() -> list[str]:
    """The names of `recompute`, in the order in which docs/everything.md comes to them."""
    text = (ROOT / "docs" / "everything.md").read_text(encoding="utf-8").partition("\n## ")[2]
    found = {name: re.search(rf"`(rc\.)?{name}\b", text) for name in recompute.__all__}
    return sorted(recompute.__all__, key=lambda name: found[name].start() if found[name] else len(text))


def surface() -> str:
    """The page of `recompute`: what a user needs first, and the layers of the library at its end."""
    parts = [f"::: recompute.{name}\n    options:\n      show_root_heading: true\n" for name in taught()]
    about, _, layers = (recompute.__doc__ or "").partition("\n\nThe layers")
    return "\n".join(
        ["# recompute\n", f"{about}\n", *parts, f"## The layers\n\n```text\nThe layers{layers.rstrip()}\n```\n"]
    )


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """The navigation is the map: the sections and the tables of docs/index.md, then the reference."""
    nav: list[Any] = [{"Home": "index.md"}]
    for section in (ROOT / "docs" / "index.md").read_text(encoding="utf-8").split("\n## ")[1:]:
        pages = [{title: path} for title, path in re.findall(r"^\| \[(.+?)\]\((.+?)\)", section, flags=re.MULTILINE)]
        name = section.partition("\n")[0]
        if name == "Reference":
            pages.append(
                {"Modules": [{"Modules": "reference/index.md"}, *({m: f"reference/{m}.md"} for m in modules())]}
            )
        nav.append({name: pages})
    results = sorted(path.name for path in (ROOT / "docs" / "results").glob("*.md") if path.name != "README.md")
    nav.append({"Measurements": [f"results/{name}" for name in results]})
    config.nav = nav
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each public module, and the README."""
    names = modules()
    lines = ["# Reference", "", "Every public module, from its docstrings and types.", ""]
    for name in names:
        content = surface() if name == "recompute" else f"# {name}\n\n::: {name}\n"
        files.append(File.generated(config, f"reference/{name}.md", content=content))
        lines.append(f"* [`{name}`]({name}.md)")
    files.append(File.generated(config, "reference/index.md", content="\n".join(lines) + "\n"))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links to files outside of docs/ lead to nothing on a site: their text stays."""
    here = Path(config.docs_dir, page.file.src_uri).parent

    def leads_out(found: re.Match[str]) -> str:
        target = (here / found[2].partition("#")[0]).resolve()
        return found[0] if target.is_relative_to(Path(config.docs_dir).resolve()) else found[1]

    return re.sub(r"(?<!!)\[([^\]]+)\]\((?![a-z]+:|#)([^)\s]+)\)", leads_out, markdown)
