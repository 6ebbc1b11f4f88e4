"""What is installed and what it needs. Tool settings: pyproject.toml; exact versions: scripts/constraints.txt."""

import base64
import hashlib
import re
import zipfile
from pathlib import Path

from setuptools import find_packages, setup

try:
    from setuptools.command.editable_wheel import editable_wheel
except ImportError:  # setuptools < 64 makes no editable wheels
    editable_wheel = None

ROOT = Path(__file__).resolve().parent
README = ROOT / "README.md"

ON_WHEEL_PLATFORM = (
    'platform_python_implementation == "CPython" and python_version >= "3.11" and python_version < "3.13"'
    ' and sys_platform == "linux" and platform_machine == "x86_64"'
)
ELSEWHERE = (
    'platform_python_implementation != "CPython" or python_version < "3.11" or python_version >= "3.13"'
    ' or sys_platform != "linux" or platform_machine != "x86_64"'
)

# What an editable install puts into site-packages beside its path entry. The note lies in the upper folder because pip
# removes only folders that directly hold a file.
PLACEHOLDERS = {
    "fairseq_collab/EDITABLE.txt": "fairseq finds `--user-dir fairseq_collab` by this folder; the code is elsewhere.\n",
    "fairseq_collab/models/transformer.py": (
        'raise ImportError("the folder of the editable install of fairseq_collab is gone: install it again")\n'
    ),
}


def version() -> str:
    text = (ROOT / "fairseq_collab" / "__init__.py").read_text(encoding="utf-8")
    return re.search(r'^__version__ = "(.+)"$', text, re.MULTILINE).group(1)


def add_to_wheel(wheel: Path, texts: dict[str, str]) -> None:
    """Rewrite a wheel with more files, listed in its RECORD so that uninstalling removes them."""
    with zipfile.ZipFile(wheel) as archive:
        files = {info.filename: archive.read(info) for info in archive.infolist()}
    record = next(name for name in files if name.endswith(".dist-info/RECORD"))
    for name, text in texts.items():
        files[name] = text.encode()
        digest = base64.urlsafe_b64encode(hashlib.sha256(files[name]).digest()).rstrip(b"=").decode()
        files[record] += f"{name},sha256={digest},{len(files[name])}\n".encode()
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)


commands = {}
if editable_wheel is not None:

    class EditableWheelForFairseq(editable_wheel):
        """fairseq looks for `--user-dir NAME` beside itself: leave a folder there."""

        def run(self) -> None:
            super().run()
            for wheel in Path(self.dist_dir).glob("fairseq_collab-*.whl"):
                add_to_wheel(wheel, PLACEHOLDERS)

    commands["editable_wheel"] = EditableWheelForFairseq

setup(
    name="fairseq_collab",
    version=version(),
    description="Collaborative multi-head attention for stock fairseq",
    long_description=README.read_text(encoding="utf-8") if README.exists() else "",
    long_description_content_type="text/markdown",
    author="the fairseq_collab authors",
    license="MIT",
    packages=find_packages(include=["fairseq_collab", "fairseq_collab.*", "data_prep", "data_prep.*"]),
    # an explicit root makes an editable install a plain path entry, which wins over the folder of PLACEHOLDERS
    package_dir={"": "."},
    python_requires=">=3.10",
    install_requires=[
        "torch>=2.1",
        "tensorly>=0.8",
        "sacrebleu>=2.3",
        "sentencepiece>=0.1.99",
        "tqdm>=4.62",
        "numpy>=1.21.3",
    ],
    extras_require={
        "fairseq": [f"ve-fairseq==0.12.3; {ON_WHEEL_PLATFORM}", f"fairseq-fixed==0.12.3.1; {ELSEWHERE}"],
        "hf": ["transformers>=4.57", "safetensors>=0.4"],
        "corpora": ["sacremoses>=0.2"],
        "plot": ["matplotlib>=3.6"],
        "tensorboard": ["tensorboard>=2.12"],
        "serve": ["ctranslate2>=4.5"],
        "dev": ["pytest>=7.4", "pytest-xdist>=3.5", "ruff>=0.6", "setuptools>=70.1"],
    },
    entry_points={"console_scripts": ["fairseq-collab-convert = fairseq_collab.cli.convert:main"]},
    cmdclass=commands,
)
