"""Command lines that are installed with the package."""
