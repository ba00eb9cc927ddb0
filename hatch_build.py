"""What a release says of itself on an index: the README with links that lead somewhere there, and its addresses.

The links of README.md are relative to the repository. The release workflow knows the repository and the commit, and
they become addresses there. A build elsewhere knows neither, and keeps the text of links and leaves pictures out.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

__all__ = ["Addresses", "description"]

_LINK = re.compile(r"(?P<picture>!?)\[(?P<text>[^\]]*)\]\((?P<path>(?!https?:|#)[^)\s]+)\)")


def description(readme: str, repository: str, commit: str) -> str:
    """Return README.md with its relative links led to a commit of the repository, or taken out without one."""

    def led(found: re.Match[str]) -> str:
        picture, text, path = found["picture"], found["text"], found["path"]
        if repository:
            return f"{picture}[{text}]({repository}/{'raw' if picture else 'blob'}/{commit}/{path})"
        return "" if picture else text

    return _LINK.sub(led, readme)


class Addresses(MetadataHookInterface):
    """Fill in the description and the addresses of the project."""

    PLUGIN_NAME = "custom"

    def update(self, metadata: dict[str, Any]) -> None:
        """Change the metadata in place.

        Args:
            metadata: the table ``project`` of pyproject.toml.
        """
        names = ("GITHUB_SERVER_URL", "GITHUB_REPOSITORY", "GITHUB_SHA")
        server, name, commit = (os.environ.get(variable, "") for variable in names)
        repository = f"{server}/{name}" if server and name and commit else ""
        readme = Path(self.root, "README.md").read_text(encoding="utf-8")
        text = description(readme, repository, commit)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
        paths = {"Source": "", "Issues": "/issues", "Changelog": f"/blob/{commit}/CHANGELOG.md"}
        metadata["urls"] = {label: repository + path for label, path in paths.items() if repository}
