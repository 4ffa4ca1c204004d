"""`python -m eggpu.distributed N SCRIPT [ARGUMENT...]`: a script in N processes of this machine."""

from __future__ import annotations

import sys

from eggpu.distributed import DistributedError, launch


def main(argv: list[str]) -> int:
    """Run it; the exit status of the processes."""
    if len(argv) < 2 or not argv[0].isdecimal():
        print("usage: python -m eggpu.distributed N SCRIPT [ARGUMENT...]", file=sys.stderr)
        return 2
    try:
        return launch(int(argv[0]), argv[1:])
    except DistributedError as error:
        print(f"eggpu: error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
