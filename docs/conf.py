"""The documentation's site: `make docs` builds it into docs/_build, without a network; it is also read offline, with formulas as MathML."""

from docutils import nodes
from latex2mathml.converter import convert

project = "headcount"
author = "The headcount authors"
copyright = "the headcount authors, Apache-2.0"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "headcount"
html_copy_source = False
html_show_sourcelink = False
myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 3
napoleon_google_docstring = False
napoleon_use_rtype = False
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
copybutton_prompt_text = ">>> "
suppress_warnings = ["myst.xref_missing"]  # links to files of the repository outside docs/
html_math_renderer = "mathml"


def _inline(self, node) -> None:
    self.body.append(convert(node.astext()))
    raise nodes.SkipNode


def _block(self, node) -> None:
    self.body.append(f'<div class="math">{convert(node.astext(), display="block")}</div>')
    raise nodes.SkipNode


def setup(app) -> None:
    app.add_html_math_renderer("mathml", (_inline, None), (_block, None))
