"""What the site has beyond this folder: the pages that lie in the repository's root, with links that fit the site."""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
PAGES = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md", "SECURITY.md": "security.md"}


def _moved(match: re.Match[str]) -> str:
    """The target of a link, seen from docs/ instead of from the root."""
    target = match.group(1)
    return f"]({PAGES.get(target, target.removeprefix('docs/'))}"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Called by MkDocs with all files of docs/."""
    for source, target in PAGES.items():
        text = re.sub(r"\]\(((?:docs/)?[\w/]+\.md)", _moved, (ROOT / source).read_text())
        files.append(File.generated(config, target, content=text))
    return files
