"""Registers the model families with fairseq, which imports every module of this package itself."""

from fairseq_posenc.host.startup import prepare

prepare()  # fairseq's commands import this package before they open data or checkpoints
