"""What `experiments.py` consists of. Only that script and the tests import it."""
