"""Settings of the site that ``make site`` builds of these pages, without a network.

Formulas become MathML, which browsers draw themselves: no script is fetched for them.
"""

from __future__ import annotations

import logging

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.writers.html5 import HTML5Translator

project = "fairseq-posenc"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4
html_theme = "furo"
html_title = project
html_math_renderer = "mathml"
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_copyright = False
autodoc_member_order = "bysource"
autodoc_typehints = "description"
napoleon_use_ivar = True

# fairseq, which the reference imports, asks for tensorboardX.
logging.getLogger("fairseq.tasks.text_to_speech").setLevel(logging.WARNING)


def setup(app: Sphinx) -> None:
    """Register what draws formulas."""
    app.add_html_math_renderer("mathml", (_formula, None), (_formula, None))


def _formula(page: HTML5Translator, node: nodes.math | nodes.math_block) -> None:
    page.body.append(tex2mathml(node.astext(), as_block=isinstance(node, nodes.math_block)))
    raise nodes.SkipNode
