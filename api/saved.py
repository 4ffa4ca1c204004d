"""Plans on disk: what a compiled function wrote, run without compiler and e-graph."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eggpu.compiler.errors import IRError, TypeMismatch
from eggpu.compiler.schedule.plan import Plan
from eggpu.compiler.types import DTYPES, Type, parse_type

FORMAT = "eggpu-plan-1"


def save(path: str | Path, plan: Plan, types: Sequence[Type]) -> None:
    """Write a plan with the types of its results; results are a flat list when loaded."""
    from eggpu.compiler.schedule.serialize import plan_to_json

    content = {"format": FORMAT, "plan": plan_to_json(plan), "types": [repr(t) for t in types]}
    Path(path).write_text(json.dumps(content), encoding="utf-8")


class LoadedPlan:
    """A saved plan on the current device. Call it with the leaves of the arguments in order; it
    gives a list of arrays. Raises TypeMismatch for arguments of other types."""

    def __init__(self, plan: Plan, types: Sequence[Type]) -> None:
        from eggpu.runtime import Executable
        from eggpu.session import device

        self.plan = plan
        self.types = tuple(types)
        self._executable = Executable(plan, device())

    def __call__(self, *leaves: Any) -> list[Any]:
        from eggpu.compiler.tracing import Array, leaf_type
        from eggpu.leaves import DeviceStorage, buffers_of

        self._check([leaf_type(v) for v in leaves])
        on = self._executable.device
        buffers = self._executable(buffers_of(leaves, on))
        return [
            Array(storage=DeviceStorage(t, b)) for t, b in zip(self.types, buffers, strict=True)
        ]

    def _check(self, types: Sequence[Type]) -> None:
        """Raise TypeMismatch for arguments of other types: memory alone does not tell."""
        inputs = [self.plan.buffers[b] for b in self.plan.inputs]
        needed = [Type(b.shape, DTYPES[b.dtype]) for b in inputs]
        if len(types) != len(needed):
            each = ", ".join(f"{b.name}: {t}" for b, t in zip(inputs, needed, strict=True))
            raise TypeMismatch(
                f"{self.plan.name} needs {len(needed)} arrays ({each}), got {len(types)}"
            )
        for b, need, came in zip(inputs, needed, types, strict=True):
            if came != need:
                raise TypeMismatch(f"{self.plan.name} needs {b.name}: {need}, got {came}")


def load(path: str | Path) -> LoadedPlan:
    """Load what `Compiled.save` wrote. Raises IRError when the file is not such a plan."""
    from eggpu.compiler.schedule.serialize import plan_from_json

    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        if content.get("format") != FORMAT:
            raise IRError(f"{path} is not a plan of format {FORMAT}")
        return LoadedPlan(
            plan_from_json(content["plan"]), [parse_type(t) for t in content["types"]]
        )
    except (ValueError, KeyError, AttributeError) as error:
        raise IRError(f"{path} is not a saved plan: {error}") from error
