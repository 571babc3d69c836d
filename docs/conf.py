"""Settings of the site that ``make site`` builds of these pages, without a network.

Formulas become MathML, which browsers draw themselves: no script is fetched for them.
"""

from __future__ import annotations

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.writers.html5 import HTML5Translator

project = "fairseq-posenc"
extensions = ["myst_parser"]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4
html_theme = "furo"
html_title = project
html_math_renderer = "mathml"
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_copyright = False


# Pages that unfold below another one alone, so that the first level has those for users.
_PAGES_BELOW = {
    "encodings/README": ":glob:\n:hidden:\n\n*",
    "inside": ":hidden:\n\nblocked\ngpu\nbenchmarks\nreliability\npapers\nvectors/README\nlog",
}


def setup(app: Sphinx) -> None:
    """Register what draws formulas, and the pages below others."""
    app.add_html_math_renderer("mathml", (_formula, None), (_formula, None))
    app.connect("source-read", _add_pages_below)


def _add_pages_below(app: Sphinx, page: str, source: list[str]) -> None:
    if page in _PAGES_BELOW:
        source[0] += f"\n```{{toctree}}\n{_PAGES_BELOW[page]}\n```\n"


def _formula(page: HTML5Translator, node: nodes.math | nodes.math_block) -> None:
    page.body.append(tex2mathml(node.astext(), as_block=isinstance(node, nodes.math_block)))
    raise nodes.SkipNode
