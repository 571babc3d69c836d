"""The model families: importing a module here registers its names with fairseq."""

from fairseq_posenc.host.startup import prepare

prepare()
