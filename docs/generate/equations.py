"""Converts the plain formulas of docstrings to LaTeX, which GitHub renders."""

import re

# Patterns and their replacements, applied in this order: later ones see the LaTeX of earlier ones.
# Formulas have no decimals, and no function's name as a subscript.
RULES: tuple[tuple[str, str], ...] = (
    (r"abs\(([^()]*)\)", r"\\left\\vert \1 \\right\\vert"),  # abs(x)
    (r"sqrt\(([^()]*)\)", r"\\sqrt{\1}"),  # sqrt(x)
    (r"_\(([^()]*)\)", r"_{\1}"),  # a_(i-j): a subscript in brackets
    (r"\^\(([^()]*)\)", r"^{\1}"),  # 2^(-h): an exponent
    (r"_([a-z]{3,})", r"_{\\mathrm{\1}}"),  # b_key: a word as subscript
    (r"_([a-z0-9]{2})\b", r"_{\1}"),  # s_ij: two letters as subscript
    (r"\br([12])\b", r"r_\1"),  # r1: KERPLE's parameters
    (r"(?<=[\w)}])\.(?=[\w(])", r" \\cdot "),  # q_i.k_j: a dot product
    (r" \* ", r" \\, "),  # a * b: a thin space
    (r"\b(log|cos|sin|max)\b", r"\\\1"),
    (r"\bsum_", r"\\sum_"),
)


def split_equation(equation: str) -> tuple[str, str]:
    """Split the Equation section of a docstring into the formula and the prose after ``where``."""
    formula, _, prose = equation.partition(" where ")
    return formula.rstrip(",. "), prose


def to_latex(formula: str) -> str:
    """Convert a plain formula to LaTeX."""
    for pattern, replacement in RULES:
        formula = re.sub(pattern, replacement, formula)
    return formula
