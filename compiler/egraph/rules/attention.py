"""todo"""

from __future__ import annotations

from ..patterns import Rule

RULES: tuple[Rule, ...] = ()
