"""Run a function when a module has been imported, or now if it has been already.

A finder in sys.meta_path that finds nothing itself: for a watched name it asks the finders after it for the spec and lets
the spec's own loader run, then the callback. Module, loader and spec stay what they would be without it. It costs nothing
until the module is imported, and works whoever imports it, another plugin included.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

Callback = Callable[[ModuleType], None]


class _Watcher(MetaPathFinder):
    def __init__(self) -> None:
        self.callbacks: dict[str, Callback] = {}

    def find_spec(self, fullname: str, path: object, target: ModuleType | None = None) -> ModuleSpec | None:
        callback = self.callbacks.get(fullname)
        if callback is None:
            return None
        spec = self._find_elsewhere(fullname, path, target)
        exec_module = getattr(spec and spec.loader, "exec_module", None)
        if exec_module is None:
            return spec

        def exec_then_call(module: ModuleType) -> None:
            exec_module(module)
            callback(module)

        with contextlib.suppress(AttributeError):  # a loader without instance attributes: builtin or frozen
            spec.loader.exec_module = exec_then_call
        return spec

    def _find_elsewhere(self, fullname: str, path: object, target: ModuleType | None) -> ModuleSpec | None:
        for finder in list(sys.meta_path):
            if finder is not self and hasattr(finder, "find_spec"):
                spec = finder.find_spec(fullname, path, target)
                if spec is not None:
                    return spec
        return None


_watcher = _Watcher()


def after_import(name: str, callback: Callback) -> None:
    """Call `callback(module)` once the module `name` has run; at once if it has. A later call replaces the callback.

    What the callback raises reaches the importer: callbacks must not raise.
    """
    _watcher.callbacks[name] = callback
    if _watcher not in sys.meta_path:
        sys.meta_path.insert(0, _watcher)
    module = sys.modules.get(name)
    if module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False):
        callback(module)


def forget(name: str) -> None:
    """Stop watching `name`; the finder goes with its last name."""
    _watcher.callbacks.pop(name, None)
    if not _watcher.callbacks and _watcher in sys.meta_path:
        sys.meta_path.remove(_watcher)
