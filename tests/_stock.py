"""What the installed fairseq fails at by itself, so that collaborative models cannot be tested on it either."""

import pytest

# by version: what is tried, and why it fails
FAILURES = {
    "0.12.2": {
        "denoising": "its denoising tasks add --max-source-positions, which encoder-decoder models have added before",
        "decoding": "its fast path, which post-norm encoders of loaded models take, does not know torch 2",
        "hydra +model.NAME": "its hydra 1.0 adds nothing to a model that is not there yet",
    }
}


def skip_where_stock_fails(what: str) -> None:
    """Skips the test that calls this, or that uses the fixture that does, with the reason."""
    import fairseq

    if reason := FAILURES.get(fairseq.__version__, {}).get(what):
        pytest.skip(f"stock fairseq {fairseq.__version__} fails at {what}: {reason}")
