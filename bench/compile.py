"""How long GPT-2's training step takes from trace to plan, without the driver; prints JSON.

    python bench/compile.py --json

12 and 48 layers of GPT-2 124M's width: d 768, 12 heads, vocabulary 50257, batch 8 x 1024; forward,
backward and AdamW; each in a process of its own, after one of a single layer has left bytecode of
Python and of the templates on disk. `cached_start_s` is a second start with the plan on disk: from
the start of Python to the plan in hand, without egglog and Jinja.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from typing import Any

BATCH, CONTEXT, WIDTH, HEADS, VOCAB = 8, 1024, 768, 12, 50257
_GOALS = {
    "gpt2_12_layers_s": 5.0, "gpt2_48_layers_s": 30.0, "peak_rss_mb": 1024.0, "cached_start_s": 0.5,
}  # fmt: skip


def main() -> None:
    """Measure in child processes; print the numbers, or the stages of one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    parser.add_argument(
        "--layers", type=int, action="append", help="only these (default 12 and 48)"
    )
    parser.add_argument("--child", choices=("compile", "cached"), help=argparse.SUPPRESS)
    parser.add_argument("--target", choices=("cpu", "gpu"), default="gpu", help="llvmpipe or a GPU")
    parser.add_argument("--profile", action="store_true", help="where the time goes, by function")
    args = parser.parse_args()
    if args.child == "cached":
        print(json.dumps(cached_start()))
    elif args.child == "compile":
        print(json.dumps(compiled(args.layers[0], args.target, args.profile)))
    else:
        found = measured(args.layers or [12, 48], args.target, args.profile)
        print(json.dumps(found) if args.json else table(found))


def measured(layers: list[int], target: str, profile: bool) -> dict[str, Any]:
    """Every number; stages in seconds under `stages`."""
    out: dict[str, Any] = {}
    stages: dict[str, Any] = {}
    peaks = []
    with tempfile.TemporaryDirectory() as folder:
        run("compile", "--layers", "1", "--target", target, cache=folder)
        for count in layers:
            more = ["--profile"] if profile else []
            child = run("compile", "--layers", str(count), "--target", target, *more, cache=folder)
            out[f"gpt2_{count}_layers_s"] = child["seconds"]
            stages[str(count)] = child
            peaks.append(child["rss_mb"])
        out["peak_rss_mb"] = max(peaks)
        starts = [run("cached", cache=folder) for _ in range(4)][1:]
    assert not any(s["imported"] for s in starts), f"imported {starts[0]['imported']}"
    out["cached_start_s"] = min(s["seconds"] for s in starts)
    stages["cached"] = min(starts, key=lambda s: s["seconds"])
    return {**out, "goals": _GOALS, "stages": stages}


def run(child: str, *args: str, cache: str) -> dict[str, Any]:
    """What a child process prints last. Its standard error passes through."""
    command = [sys.executable, __file__, "--child", child, *args]
    environment = {**os.environ, "EGGPU_CACHE_DIR": cache}
    # as an installed package has: bytecode of what the sources say now
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    environment["PYTHONPYCACHEPREFIX"] = os.path.join(cache, "bytecode")
    environment["EGGPU_START"] = repr(time.time())
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    return json.loads(done.stdout.splitlines()[-1])


def compiled(layers: int, kind: str, profile: bool) -> dict[str, Any]:
    """Trace a training step and compile it to a plan; seconds by stage, peak memory, size.

    Imports of the passes count, the weights' arrays, which stay empty, do not. `cheaper` is the
    share of the predicted time that choosing e-nodes and kernels in one search saves, against
    e-nodes first and fusion afterwards.
    """
    from eggpu.compiler.pipeline import compile_graph

    graph, trace = training_step(layers)
    target = device(kind)
    start, busy = time.perf_counter(), time.process_time()
    passes = under_profile(lambda: compile_graph(graph, target), profile)
    end, busy = time.perf_counter(), time.process_time() - busy
    return {
        "seconds": round(trace + end - start, 3),
        "processor": round(trace + busy, 3),  # without what other programs take
        "rss_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
        "trace": round(trace, 3),
        **{name: round(s, 3) for name, s in passes.seconds.items()},
        "nodes": len(graph.nodes()),
        "kernels": len(passes.plan.kernels),
        "predicted_ms": round(sum(k.predicted_ns for k in passes.plan.kernels) / 1e6, 1),
        "two_steps_ms": round(passes.extraction.greedy.cost / 1e6, 1),
        "cheaper": round(1 - passes.extraction.joint.cost / passes.extraction.greedy.cost, 4),
    }


@dataclass(frozen=True)
class OnlyType:
    """Stands for an array in memory of which only the type is asked."""

    type: Any

    def numpy(self) -> Any:
        """No value is ever needed."""
        raise AssertionError("a weight's value was asked for")


def adam_state(optimizer: Any, model: Any, typed: Any) -> Any:
    """AdamW's state for a model, by the state for one of scalars: no moments are made."""
    import eggpu as eg
    from eggpu.compiler import pytree

    weights = [w.type for w in pytree.flatten(model)[0]]
    steps, structure = pytree.flatten(optimizer.init(eg.tree_map(lambda w: eg.array(0.0), model)))
    assert len(steps) == 1 + 2 * len(weights)
    return pytree.unflatten(structure, [typed(t) for t in (steps[0].type, *weights, *weights)])


def training_step(layers: int) -> tuple[Any, float]:
    """The graph of forward, backward and AdamW, and the seconds that tracing took."""
    import eggpu as eg
    from eggpu import nn, optim
    from eggpu.compiler import pytree
    from eggpu.compiler.tracing import trace_call
    from eggpu.nn import initial

    def typed(type_: Any) -> eg.Array:
        return eg.Array(storage=OnlyType(type_))

    initial.normal = lambda key, shape, std: typed(eg.parse_type(f"f32{[*shape]}"))
    model = nn.GPT(
        vocab=VOCAB, layers=layers, width=WIDTH, heads=HEADS, context=CONTEXT, key=eg.random.key(0)
    )
    optimizer = optim.adamw(1e-4, weight_decay=0.1)
    state = adam_state(optimizer, model, typed)

    def loss(model: nn.GPT, tokens: Any, targets: Any) -> Any:
        return nn.cross_entropy(model(tokens), targets)

    def step(model: nn.GPT, state: Any, tokens: Any, targets: Any) -> Any:
        value, grads = eg.value_and_grad(loss)(model, tokens, targets)
        model, state = optimizer.update(model, state, grads)
        return model, state, value

    ids = eg.parse_type(f"i32[{BATCH}, {CONTEXT}]")
    arguments = (model, state, ids, ids)
    start = time.perf_counter()
    traced = trace_call(step, arguments, name="gpt2")
    seconds = time.perf_counter() - start
    donated = len(pytree.flatten(arguments[:2])[0])
    return traced.graph.replace(donated=tuple(range(donated))), seconds


def device(kind: str) -> Any:
    """A description of a device that holds the program: a large GPU, or llvmpipe as large."""
    from eggpu.compiler.schedule.target import FLOOR, LLVMPIPE

    large: dict[str, Any] = {
        "max_binding_bytes": (2 << 30) - 4, "max_buffer_bytes": 4 << 30, "max_bindings": 16,
    }  # fmt: skip
    if kind == "cpu":
        return replace(LLVMPIPE, **large)
    large |= {"subgroup": 32, "features": ("subgroup",), "max_workgroup_bytes": 48 << 10}
    return replace(FLOOR, name="a GPU", max_invocations=1024, **large)


def under_profile(work: Any, on: bool) -> Any:
    """The result of `work`; with a profile on standard error."""
    if not on:
        return work()
    import cProfile
    import pstats

    profiler = cProfile.Profile()
    result = profiler.runcall(work)
    pstats.Stats(profiler, stream=sys.stderr).sort_stats("tottime").print_stats(35)
    return result


def cached_start() -> dict[str, Any]:
    """Start, trace a small program and take its plan from disk, or compile it the first time.

    Counts from the start of the process. Opening the device and the driver's compiler do not count.
    """
    import numpy as np

    import eggpu as eg
    from eggpu import cache, nn
    from eggpu.compiler.tracing import trace_call

    def program(x: Any, w: Any) -> Any:
        return nn.softmax(nn.gelu(x @ w), -1) @ eg.transpose(w)

    x, w = np.zeros((64, 32), np.float32), np.zeros((32, 48), np.float32)
    from eggpu.compiler.schedule.target import LLVMPIPE

    graph = trace_call(program, (x, w)).graph
    name = cache.key(graph, LLVMPIPE, eg.Options())
    plan = cache.load(name)
    if plan is None:
        from eggpu.compiler.pipeline import compile_graph

        cache.store(name, compile_graph(graph, LLVMPIPE).plan)
        return {"seconds": 0.0, "imported": []}
    seconds = time.time() - float(os.environ["EGGPU_START"])
    busy = round(time.process_time(), 3)
    heavy = ("eggpu.compiler.egraph.engine", "egglog", "jinja2")
    imported = [m for m in heavy if m in sys.modules]
    return {"seconds": round(seconds, 3), "processor": busy, "imported": imported}


def table(found: dict[str, Any]) -> str:
    """The numbers with their goals, and the stages below."""
    lines = [
        f"{name:20} {found[name]:9.3f}   goal {goal:g}"
        for name, goal in _GOALS.items()
        if name in found
    ]
    for count, stages in found["stages"].items():
        lines.append(f"{count}: " + ", ".join(f"{n} {v}" for n, v in stages.items()))
    return "\n".join(lines)


if __name__ == "__main__":
    main()
