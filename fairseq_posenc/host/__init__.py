"""Prepares fairseq's commands at start-up: guards against lost runs, numpy's old names."""
