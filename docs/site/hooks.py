"""MkDocs hooks: add the README and its neighbours as pages, and generate the reference pages from the library.

The sources link to paths of the repository, so that the links work there too. On the site, a link to a file outside docs/ leads
to a copy of the file.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

HERE = Path(__file__).resolve().parent
DOCS, ROOT = HERE.parent, HERE.parents[1]
sys.path.insert(0, str(ROOT))

PAGES = {
    "index.md": "README.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "CHANGELOG.md": "CHANGELOG.md",
}
EXTERNAL = re.compile(r"<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=.?https?:[^ >]*")
LINK = re.compile(r"(?<=\]\()([^)\s#:]+)(?=[#)])")
PROTOCOLS = {  # interfaces that users may implement
    "ipu_pipe.data.DataSource": "",
    "ipu_pipe.backends.interface.Backend": "",
    "ipu_pipe.backends.interface.Engine": "",
}


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages to the site's files."""
    for name, source in PAGES.items():
        files.append(
            File.generated(config, name, content=(ROOT / source).read_text(encoding="utf-8"))
        )
    for name in ("site.css", "iframe-worker.js"):
        files.append(File.generated(config, name, abs_src_path=str(HERE / name)))
    text_by_page = {"api": api(), "commands": commands()}
    for name, text in text_by_page.items():
        files.append(File.generated(config, f"reference/{name}.md", content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Return the page with links to paths of the repository replaced by links to pages of the site."""
    name = page.file.src_uri
    folder = (ROOT / PAGES[name]).parent if name in PAGES else (DOCS / name).parent

    def translate(match: "re.Match[str]") -> str:
        target = (folder / match.group(1)).resolve()
        if not target.exists():
            return match.group(1)  # mkdocs warns of it
        if target.is_dir():
            target = next(
                (
                    target / index
                    for index in ("README.md", "table.md")
                    if (target / index).is_file()
                ),
                target,
            )
        if target.is_relative_to(DOCS):
            uri = target.relative_to(DOCS).as_posix()
        else:
            path = target.relative_to(ROOT).as_posix()
            uri = {source: page for page, source in PAGES.items()}.get(path, f"repository/{path}")
            if files.get_file_from_path(uri) is None:
                files.append(File.generated(config, uri, abs_src_path=str(target)))
        return os.path.relpath(uri, os.path.dirname(name) or ".")

    return LINK.sub(translate, markdown)


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Return the page; raise `PluginError` if a reader's browser would fetch anything from another site."""
    external = EXTERNAL.search(output)
    if external:
        raise PluginError(f"{page.file.src_uri}: fetches {external.group()}")
    return output


def api() -> str:
    """Return the Markdown of the Python reference: the public names, then the interfaces that users may implement."""
    import ipu_pipe

    lines = [
        "# Python",
        "",
        "The public names of `import ipu_pipe`, and the interfaces that you may implement.",
        "",
    ]
    for name in [*(f"ipu_pipe.{public}" for public in ipu_pipe.__all__), *PROTOCOLS]:
        lines += [f"::: {name}", ""]
    return "\n".join(lines)


def commands() -> str:
    """Return the Markdown of the reference of commands: each with its --help."""
    import importlib

    from ipu_pipe.cli import COMMANDS
    from ipu_pipe.shipped import COMMAND, name_commands

    os.environ["COLUMNS"] = "110"
    lines = [
        "# Commands",
        "",
        f"`{COMMAND} COMMAND` works in any folder; in a clone, `python tools/COMMAND.py` is the same.",
        "",
    ]
    for name, summary in COMMANDS.items():
        parser = importlib.import_module(f"ipu_pipe.cli.{name}").main.make_parser()
        lines += [f"## {name.replace('_', '-')}", "", f"{summary[0].upper()}{summary[1:]}.", ""]
        lines += ["```text", name_commands(parser.format_help(), COMMAND).rstrip(), "```", ""]
    return "\n".join(lines)
