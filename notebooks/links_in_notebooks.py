"""Turns the links in notebooks into links of the site: mkdocs does so in Markdown pages only.

`[Porting](porting.md)` in a notebook becomes a link to `../porting/`. A link to a file that is no page of the site is a
warning, and so an error with `--strict`.
"""

import logging
import re
from posixpath import dirname, join, normpath

log = logging.getLogger("mkdocs.hooks.links_in_notebooks")


def on_page_content(html, page, config, files):
    if not page.file.src_uri.endswith(".ipynb"):
        return html

    def link_of_the_site(found):
        path, anchor = found.groups()
        target = files.get_file_from_path(normpath(join(dirname(page.file.src_uri), path)))
        if target is None or target.inclusion.is_excluded():
            log.warning("%s has a link to %s, which is no page of the site.", page.file.src_uri, path)
            return found[0]
        return f'href="{target.url_relative_to(page.file)}{anchor}"'

    return re.sub(r'href="([^":#]+\.(?:md|ipynb))((?:#[^"]*)?)"', link_of_the_site, html)
