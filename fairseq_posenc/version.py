"""The one place that holds the version of this package."""

__version__ = "0.2.0"
