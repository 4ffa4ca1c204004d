"""`python -m eggpu.distributed N SCRIPT [ARGUMENT...]`: a script in N processes of this machine."""

from __future__ import annotations

import sys

from eggpu.distributed import DistributedError, launch

_HELP = """usage: python -m eggpu.distributed N SCRIPT [ARGUMENT...]

Run a Python script in N processes of this machine that are one group (eggpu.distributed.init()),
joined by MPI or by torch.distributed's gloo.

  N         number of processes
  SCRIPT    file of a script, or -m and a module
  ARGUMENT  handed on to it"""


def main(argv: list[str]) -> int:
    """Run it; the exit status of the processes."""
    if argv[:1] in (["-h"], ["--help"]):
        print(_HELP)
        return 0
    if len(argv) < 2 or not argv[0].isdecimal():
        print(_HELP.splitlines()[0], file=sys.stderr)
        return 2
    try:
        return launch(int(argv[0]), argv[1:])
    except DistributedError as error:
        print(f"eggpu: error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
