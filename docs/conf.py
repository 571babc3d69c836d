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


# Below the overview of the encodings, so that the two dozen pages unfold there alone.
_PAGES_BELOW = """
```{toctree}
:glob:
:hidden:

*
```
"""


def setup(app: Sphinx) -> None:
    """Register what draws formulas, and what the page of all encodings has below it."""
    app.add_html_math_renderer("mathml", (_formula, None), (_formula, None))
    app.connect("source-read", _place_encodings)


def _place_encodings(app: Sphinx, page: str, source: list[str]) -> None:
    if page == "encodings/README":
        source[0] += _PAGES_BELOW


def _formula(page: HTML5Translator, node: nodes.math | nodes.math_block) -> None:
    page.body.append(tex2mathml(node.astext(), as_block=isinstance(node, nodes.math_block)))
    raise nodes.SkipNode
