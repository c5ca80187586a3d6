"""Options of installed packages: their folders of YAML files, on Hydra's search path. docs/adding_a_component.md has an
example. Hydra takes plugins from this package alone.
"""

from __future__ import annotations

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin


class PackagesPlugin(SearchPathPlugin):
    """Adds the folders where `conf/` is searched, because Hydra asks this class in every program of an environment."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        from offline_grpo.config import compose

        own = str(compose.folder())
        if any(each.path.removeprefix("file://") == own for each in search_path.get_path()):
            for folder in compose.packages():
                search_path.append("package", f"file://{folder}")
