"""Add the description that a package index shows. Everything else of the package is in pyproject.toml."""

import re
from pathlib import Path

from setuptools import setup


def describe() -> str:
    """Return README without what leads into the clone: pictures go, links become their words.

    An index resolves no relative path, and the project has no public address with which they could be absolute.
    """
    text = (Path(__file__).parent / "README.md").read_text(encoding="utf-8")
    text = re.sub(r"^!\[[^]]*\]\((?!https?:)[^)]*\)\n+", "", text, flags=re.MULTILINE)
    return re.sub(r"\[([^]]*)\]\((?!https?:|#)[^)]*\)", r"\1", text)


if __name__ == "__main__":
    setup(long_description=describe(), long_description_content_type="text/markdown")
