"""Packaging of fairseq-posenc; the settings of the tools are in pyproject.toml."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
# Read, not imported: importing the package would need torch and fairseq.
(VERSION,) = re.findall(
    r'__version__ = "(.+)"', (HERE / "fairseq_posenc" / "version.py").read_text(encoding="utf-8")
)

PLOT = ["matplotlib", "scikit-learn"]
# Models carried to transformers and back. Tests compare with the last line of releases whose BERT
# still has `relative_key` attention.
HF = ["safetensors", "tokenizers", "transformers>=4.57"]
OLD_HF = ["transformers<5"]
# Encoders as graphs.
ONNX = ["onnx", "onnxruntime", "onnxscript"]
DEV = ["hypothesis", "mypy", "pre-commit", "pytest", "pytest-timeout", "pytest-xdist", "ruff"]
# torch for CUDA brings it; without a GPU its interpreter runs the kernels' tests.
TRITON = ['triton; sys_platform == "linux"']
# BLEU-4 as reports of course work have it, beside sacreBLEU's.
NLTK = ["nltk"]
# Drives the Chromium of the system, which the attention report is tested in.
BROWSER = ["playwright"]
# Other Pythons, fairseqs and torches.
MATRIX = ["tox"]
# The site of docs/.
SITE = ["furo", "myst-parser", "sphinx"]
# Corpora that are published as Parquet.
PARQUET = ["pyarrow"]
# Runs of GLUE as jobs of a cluster.
SUBMITIT = ["submitit"]
# Where fairseq-train sends its figures with --tensorboard-logdir and --wandb-project.
TENSORBOARD = ["tensorboard"]
WANDB = ["wandb"]

# Folders that stand at the top of a checkout, and are within the package in a wheel.
PREPROCESS = ["preprocess", *(f"preprocess.{name}" for name in find_packages("preprocess"))]
CONFIGS = ["finetune_configs", "finetune_configs.glue"]
RESULTS = "docs.results"

setup(
    name="fairseq-posenc",
    version=VERSION,
    description="Position encodings as a part you choose, for fairseq Transformers",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="MIT",
    python_requires=">=3.10",
    packages=[
        *find_packages(include=["fairseq_posenc", "fairseq_posenc.*"]),
        *(f"fairseq_posenc.{name}" for name in [*PREPROCESS, *CONFIGS, RESULTS]),
    ],
    package_dir={
        **{f"fairseq_posenc.{name}": name for name in ("preprocess", "finetune_configs")},
        f"fairseq_posenc.{RESULTS}": RESULTS.replace(".", "/"),
    },
    package_data={"": ["py.typed", "*.html", "*.json", "*.yaml"]},
    install_requires=[
        # The official fairseq cannot be imported on Python 3.11 and later;
        # fairseq-fixed is the same toolkit, under the same import name, that can.
        'fairseq-fixed==0.12.3.1; python_version >= "3.11"',
        'fairseq>=0.12.2; python_version < "3.11"',
        "argcomplete",
        "numpy",
        "regex",
        "sacrebleu",
        "scipy",
        "sentencepiece>=0.2.3",  # whose offsets SQuAD needs
        "tiktoken",
        "tqdm",
        "torch>=2.6",  # from here on loading a checkpoint runs no code
        "zstandard",
    ],
    extras_require={
        "plot": PLOT,
        "hf": HF,
        "onnx": HF + ONNX,
        "nltk": NLTK,
        "parquet": PARQUET,
        "submitit": SUBMITIT,
        "browser": BROWSER,
        "matrix": MATRIX,
        "site": SITE,
        "tensorboard": TENSORBOARD,
        "wandb": WANDB,
        "dev": [
            *(DEV + PLOT + HF + OLD_HF + ONNX + NLTK + PARQUET + BROWSER + SITE + SUBMITIT),
            *TENSORBOARD,
            *TRITON,
        ],
    },
    entry_points={"console_scripts": ["fairseq-posenc = fairseq_posenc.workbench.cli:main"]},
)
