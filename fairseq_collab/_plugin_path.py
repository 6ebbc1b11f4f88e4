"""Makes every spelling of fairseq's `--user-dir` work. No models and no registrations here.

`fairseq.utils.import_user_module` turns `--user-dir` into a folder, imports the package of that name and then every
module in its `models/`. When the package was imported before, it only accepts the folder if the package's `__path__`
holds exactly the same string, and it leaves `models/` alone.
"""

import importlib
import logging
import os
import sys

logger = logging.getLogger(__name__)

# What an editable install leaves beside fairseq, without an __init__.py, so that the plain name is found (setup.py).
PLACEHOLDER = os.path.join("models", "transformer.py")


class PluginPath(list):
    """A package's `__path__` that also answers for other spellings and other copies of the package.

    Asked whether it contains a folder that is a copy of this package, it says yes, warns if that copy is not the one
    in use, and, when it is fairseq that asks, makes sure that the models are registered.
    """

    def __contains__(self, path: object) -> bool:
        if not isinstance(path, str) or not self._is_copy(path):
            return super().__contains__(path)
        if os.path.isfile(os.path.join(path, "__init__.py")) and not self._is_in_use(path):
            logger.warning(
                "--user-dir names the copy of %s in %s, but the copy in %s was imported first and is the one in use",
                __package__,
                os.path.abspath(path),
                self[0],
            )
        if "fairseq.models" in sys.modules:
            importlib.import_module(f"{__package__}.models")
        return True

    def _is_copy(self, path: str) -> bool:
        return os.path.basename(os.path.abspath(path)) == os.path.basename(self[0]) and any(
            os.path.isfile(os.path.join(path, file)) for file in ("__init__.py", PLACEHOLDER)
        )

    def _is_in_use(self, path: str) -> bool:
        return os.path.realpath(path) == os.path.realpath(self[0])
