"""Writes the generated parts of the documentation: tables, pages, YAML files and pictures."""
