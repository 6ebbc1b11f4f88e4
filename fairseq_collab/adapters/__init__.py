"""Where models keep their attention. One file a family; no mathematics and no files."""
