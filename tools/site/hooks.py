"""The pages of the site: every Markdown file of the repository, and each file of code that one of them links to.

The site has the repository's folders, so that the relative links that work on GitHub and in a checkout work there too.
Hooks of MkDocs: https://www.mkdocs.org/user-guide/configuration/#hooks
"""

from __future__ import annotations

import posixpath
import re
import subprocess
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
NAVIGATION = "docs/README.md"
# Files that a browser shows or saves as they are.
_AS_THEY_ARE = (".ipynb", ".jpg", ".png", ".svg")
_IMAGE = re.compile(r'\b(?:src|srcset)="([^":]+)"')
_LINK = re.compile(r"(?<=\]\()(?!https?:|mailto:|#)([^)#\s]+)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Take the navigation from docs/README.md: headings are sections, links of lists pages; the rest is "More"."""
    navigation: list[dict[str, Any]] = [{"Home": "README.md"}]
    for section in _read(NAVIGATION).split("\n## ")[1:]:
        pages = re.findall(r"^- \[(.+?)\]\((.+?)\)", section, re.MULTILINE)
        heading = section.partition("\n")[0]
        navigation.append({heading: [{title: _resolve(target, NAVIGATION)} for title, target in pages]})
    listed = {
        NAVIGATION,
        *(page for section in navigation[1:] for pages in section.values() for one in pages for page in one.values()),
    }
    more = [
        name for name in _tracked() if posixpath.dirname(name) == "docs" and name.endswith(".md") and name not in listed
    ]
    config.nav = [*navigation, *([{"More": more}] if more else [])]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Put the repository's pages in place of docs/ alone."""
    for file in files.documentation_pages():
        files.remove(file)
    pages = [name for name in _tracked() if name.endswith(".md")]
    for name in pages:
        files.append(File.generated(config, name, content=_read(name)))
    linked = {
        _resolve(target, name)
        for name in pages
        for pattern in (_LINK, _IMAGE)
        for target in pattern.findall(_read(name))
    }
    for name in sorted(linked & set(_tracked()) - set(pages)):
        if name.endswith(_AS_THEY_ARE):
            files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
        else:
            files.append(File.generated(config, f"{name}.md", content=_show(name)))
    files.append(File.generated(config, "site.css", content=_read("tools/site/site.css")))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links to folders and code to their pages."""

    def lead(link: re.Match[str]) -> str:
        target = _resolve(link[1], page.file.src_uri)
        for suffix in ("/README.md", ".md"):
            if files.get_file_from_path(target + suffix):
                return link[1].rstrip("/") + suffix
        return link[1]

    return _LINK.sub(lead, markdown)


def on_post_build(config: MkDocsConfig) -> None:
    """Put each page's own Markdown beside it, and llms.txt, which lists the pages for a language model.

    Its format: https://llmstxt.org
    """
    site = Path(config.site_dir)
    for name in _tracked():
        if name.endswith(".md"):
            (site / name).write_text(_read(name), encoding="utf-8")
    about = _read("README.md").split("\n\n")[1].replace("\n", " ")
    sections = _read(NAVIGATION).partition("\n## ")[2].replace("](", "](docs/").strip()
    (site / "llms.txt").write_text(f"# gpufleet\n\n> {about}\n\n## {sections}\n", encoding="utf-8")


def _show(name: str) -> str:
    """A page that shows a file of code; the search leaves it out."""
    fence = "`" * 6
    language = Path(name).suffix.lstrip(".")
    return f"---\nsearch: {{exclude: true}}\n---\n\n# {name}\n\n{fence}{language}\n{_read(name)}\n{fence}\n"


def _resolve(target: str, page: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), target))


def _read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def _tracked() -> list[str]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    return listed.stdout.splitlines()
