"""What the site has besides docs/: the README and its neighbours as pages, and the references, made from the library itself.

Links are those of the repository, so that they hold there too; here a link to a file outside docs/ gets a copy of the file.
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
sys.path[:0] = [str(ROOT), str(HERE)]

import keys  # noqa: E402

PAGES = {"index.md": "README.md", "CONTRIBUTING.md": "CONTRIBUTING.md", "CHANGELOG.md": "CHANGELOG.md"}
FETCHED = re.compile(r"<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=.?https?:[^ >]*")
LINK = re.compile(r"(?<=\]\()([^)\s#:]+)(?=[#)])")
PROTOCOLS = {  # what users write themselves, or may
    "ipu_pipe.data.DataSource": "",
    "ipu_pipe.backends.interface.Backend": "",
    "ipu_pipe.backends.interface.Engine": "",
}


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are made."""
    for name, source in PAGES.items():
        files.append(File.generated(config, name, content=(ROOT / source).read_text(encoding="utf-8")))
    files.append(File.generated(config, "site.css", abs_src_path=str(HERE / "site.css")))
    made = {"api": api(), "config": keys.page(), "commands": commands()}
    for name, text in made.items():
        files.append(File.generated(config, f"reference/{name}.md", content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Turn the links of the repository into the site's."""
    name = page.file.src_uri
    folder = (ROOT / PAGES[name]).parent if name in PAGES else (DOCS / name).parent

    def here(found: "re.Match[str]") -> str:
        target = (folder / found.group(1)).resolve()
        if not target.exists():
            return found.group(1)  # mkdocs tells it
        if target.is_dir():
            target = next((target / each for each in ("README.md", "table.md") if (target / each).is_file()), target)
        if target.is_relative_to(DOCS):
            uri = target.relative_to(DOCS).as_posix()
        else:
            path = target.relative_to(ROOT).as_posix()
            uri = {source: page for page, source in PAGES.items()}.get(path, f"repository/{path}")
            if files.get_file_from_path(uri) is None:
                files.append(File.generated(config, uri, abs_src_path=str(target)))
        return os.path.relpath(uri, os.path.dirname(name) or ".")

    return LINK.sub(here, markdown)


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Refuse what a reader's browser would fetch from elsewhere."""
    fetched = FETCHED.search(output)
    if fetched:
        raise PluginError(f"{page.file.src_uri}: fetches {fetched.group()}")
    return output


def api() -> str:
    """The public names, by what they are for."""
    import ipu_pipe

    lines = ["# Python", "", "What `import ipu_pipe` gives, and what one writes for oneself.", ""]
    for name in [*(f"ipu_pipe.{each}" for each in ipu_pipe.__all__), *PROTOCOLS]:
        lines += [f"::: {name}", ""]
    return "\n".join(lines)


def commands() -> str:
    """The commands with their --help."""
    import importlib

    from ipu_pipe.cli import COMMANDS
    from ipu_pipe.shipped import COMMAND, name_commands

    os.environ["COLUMNS"] = "110"
    lines = ["# Commands", "", f"`{COMMAND} COMMAND` anywhere is `python tools/COMMAND.py` in a clone.", ""]
    for name, says in COMMANDS.items():
        parser = importlib.import_module(f"ipu_pipe.cli.{name}").make_parser()
        lines += [f"## {name.replace('_', '-')}", "", f"{says[0].upper()}{says[1:]}.", ""]
        lines += ["```text", name_commands(parser.format_help(), COMMAND).rstrip(), "```", ""]
    return "\n".join(lines)
