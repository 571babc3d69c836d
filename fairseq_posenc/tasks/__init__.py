"""Registers tasks and criterions with fairseq, which imports every module of this package."""
