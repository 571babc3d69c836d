"""What pyproject.toml cannot say: folders of a checkout that a wheel has within the package."""

import re
from pathlib import Path

from setuptools import find_packages, setup

PREPROCESS = ["preprocess", *(f"preprocess.{name}" for name in find_packages("preprocess"))]
CONFIGS = ["finetune_configs", "finetune_configs.glue"]
# Links of README.md that lead into the checkout, and pictures, which a package index has not.
PICTURE = re.compile(r":?\n\n!\[[^\]]*\]\([^)]+\)\n\n")
INTO_CHECKOUT = re.compile(r"\[([^\]]+)\]\((?!https?:)([^)]+)\)")


def description() -> str:
    text = (Path(__file__).parent / "README.md").read_text(encoding="utf-8")
    return INTO_CHECKOUT.sub(
        r"\1 (`\2`)", PICTURE.sub(lambda found: ".\n\n" if found[0][0] == ":" else "\n\n", text)
    )


setup(
    long_description=description(),
    long_description_content_type="text/markdown",
    packages=[
        *find_packages(include=["fairseq_posenc", "fairseq_posenc.*"]),
        *(f"fairseq_posenc.{name}" for name in [*PREPROCESS, *CONFIGS]),
    ],
    package_dir={f"fairseq_posenc.{name}": name for name in ("preprocess", "finetune_configs")},
    package_data={"": ["py.typed", "*.html", "*.json", "*.yaml"]},
)
