"""How ``python3 dev.py docs`` builds the site: Sphinx, with Markdown pages and docstrings."""

import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent
sys.path[:0] = [str(DOCS.parent / "src")]

from evener.version import __version__ as release  # noqa: E402, F401

project = "evener"
author = "the evener authors"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]

# Anchors are those that GitHub makes of headings, so links work in both places.
myst_heading_anchors = 4

autodoc_mock_imports = ["ray"]  # an extra
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
napoleon_google_docstring = True
napoleon_use_ivar = True  # attributes need no entries of their own

html_theme = "furo"
html_title = "evener"
html_show_sourcelink = False
html_copy_source = False
pygments_style = "default"
pygments_dark_style = "monokai"
