"""Registers the model families with fairseq, which imports every module of this package itself."""

from fairseq_posenc.host.explanations import refuse_unknown_names
from fairseq_posenc.host.startup import prepare
from fairseq_posenc.models import causal_lm, masked_lm, translation  # noqa: F401

prepare()  # fairseq's commands import this package before they open data or checkpoints
refuse_unknown_names()
