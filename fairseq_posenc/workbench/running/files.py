"""Finds folders that the package ships."""

from pathlib import Path


def find_shipped_folder(name: str) -> Path:
    """Find a folder that lies inside the package in a wheel, and beside it in a checkout."""
    package = Path(__file__).resolve().parents[2]
    inside = package / name
    return inside if inside.is_dir() else package.parent / name
