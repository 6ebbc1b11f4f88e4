"""Importing transformers beside a torchaudio that cannot be loaded, and where there is no transformers."""

import subprocess
import sys

import pytest

from fairseq_collab._transformers import import_transformers
from fairseq_collab.errors import CollabError


def test_a_torchaudio_that_cannot_be_loaded_is_hidden(tmp_path, fairseq_env):
    (tmp_path / "torchaudio").mkdir()
    (tmp_path / "torchaudio" / "__init__.py").write_text("raise OSError('built for another torch')\n")
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from fairseq_collab import swap_to_collaborative\n"
        "try:\n"
        "    import torchaudio\n"
        "except ModuleNotFoundError:\n"
        "    print('hidden')\n"
    )
    run = [sys.executable, "-c", code, str(tmp_path)]
    found = subprocess.run(run, check=True, env=fairseq_env(), capture_output=True, text=True, timeout=120)
    assert found.stdout == "hidden\n" and found.stderr == ""


def test_training_does_not_look_for_torchaudio(tmp_path, fairseq_env):
    (tmp_path / "torchaudio").mkdir()
    (tmp_path / "torchaudio" / "__init__.py").write_text("print('imported')\n")
    code = "import sys; sys.path.insert(0, sys.argv[1]); import fairseq_collab.models, fairseq_collab.convert"
    run = [sys.executable, "-c", code, str(tmp_path)]
    assert "imported" not in subprocess.run(run, check=True, env=fairseq_env(), capture_output=True, text=True).stdout


def test_swapping_imports_no_transformers(fairseq_env):
    code = (
        "import sys, fairseq_collab.swap, fairseq_collab.adapters.bert, fairseq_collab.pretrained\n"
        "assert not {'transformers', 'fairseq'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, env=fairseq_env(), timeout=120)


def test_a_missing_transformers_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(CollabError, match="transformers cannot be imported; install it with pip install"):
        import_transformers()
