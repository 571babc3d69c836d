"""Prepares fairseq's commands at start-up: safe loading, checks, resumption, messages."""
