"""Which kernel: the name of a program and the sizes it is written for."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

Size = int | float | bool | str


@dataclass(frozen=True)
class Kernel:
    """A program of `cann_ops.tile` at fixed sizes; equal kernels are one entry of every cache.

    `module` names the file, whose function `program(**sizes)` makes the TileLang program. Numbers of rows are no sizes:
    they are read at run time.
    """

    module: str
    sizes: tuple[tuple[str, Size], ...] = ()

    @classmethod
    def of(cls, module: str, **sizes: Size) -> Kernel:
        return cls(module, tuple(sorted(sizes.items())))

    def program(self) -> Any:
        """The TileLang program. Needs tilelang."""
        return self._module().program(**dict(self.sizes))

    def pass_configs(self) -> dict[str, Any]:
        """Settings of TileLang's passes that the program asks for."""
        return dict(getattr(self._module(), "PASS_CONFIGS", {}))

    def _module(self) -> Any:
        return importlib.import_module(f"cann_ops.tile.{self.module}")

    def __str__(self) -> str:
        return f"{self.module}({', '.join(f'{name}={value}' for name, value in self.sizes)})"
