"""Writes what is generated of the documentation: tables, pages, YAML files and pictures."""
