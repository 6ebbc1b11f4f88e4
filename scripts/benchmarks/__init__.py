"""The suites of ``scripts/benchmark.py``, one module each; `common` holds rows, tables, clocks and data folders."""
