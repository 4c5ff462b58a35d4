"""The documentation's site: `make docs` builds it into docs/_build, without a network; it is also read offline, with formulas as MathML."""

import sys
from pathlib import Path

from docutils import nodes
from latex2mathml.converter import convert

sys.path.insert(0, str(Path(__file__).parent))
from examples import EXTRA

project = "headcount"
author = "The headcount authors"
copyright = "the headcount authors, Apache-2.0"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.napoleon", "sphinx_copybutton"]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
templates_path = ["_templates"]
autosummary_generate = True  # a page for each object of reference/api.md, in reference/generated
exclude_patterns = ["_build", "_templates", "_static"]
html_theme = "furo"
html_title = "headcount"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
toc_object_entries_show_parents = "hide"  # the column beside a page is narrow
html_show_sourcelink = False
myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 3
napoleon_google_docstring = False
napoleon_use_rtype = False
napoleon_use_param = False  # parameters that are described together stay together
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
copybutton_prompt_text = ">>> "
suppress_warnings = ["myst.xref_missing"]  # links to files of the repository outside docs/
html_math_renderer = "mathml"


def _inline(self, node) -> None:
    self.body.append(convert(node.astext()))
    raise nodes.SkipNode


def _block(self, node) -> None:
    self.body.append(f'<div class="math">{convert(node.astext(), display="block")}</div>')
    raise nodes.SkipNode


def _complete(app, what, name, obj, options, lines) -> None:
    """Parameters, returns and examples from examples.py, for napoleon to read with the rest."""
    if name.startswith("headcount."):
        lines += EXTRA.get(name.removeprefix("headcount."), "").splitlines()


def setup(app) -> None:
    app.connect("autodoc-process-docstring", _complete, priority=100)
    app.add_html_math_renderer("mathml", (_inline, None), (_block, None))
