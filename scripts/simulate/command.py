"""The verb `tensorcache simulate` and its options."""

import argparse
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from scripts.arguments import Verbs, add_verb, path, positive
from scripts.console import progress_aside, say
from scripts.errors import UsageError

if TYPE_CHECKING:
    from scripts.simulate.replay import Measured
    from scripts.simulate.trace import Trace
    from scripts.simulate.trace_file import Request

EXAMPLES = """
  tensorcache simulate --trace conversation_trace.jsonl --capacity 1000,5859,20000,50000
  tensorcache simulate --trace mine.jsonl --capacity 20000 --policy ours,lru,optimum --json
  tensorcache simulate --generate agent --seed 7 --requests 20000 --capacity 4000,16000 --plot build/agent.svg
  tensorcache simulate --generate chat --out build/chat.jsonl            # a trace, to look at or to replay

A trace is JSON lines in Mooncake's format: {"timestamp": ms, "input_length": tokens, "output_length": tokens,
"hash_ids": [block, …]}, the ids chained: equal ids mean equal blocks behind equal prefixes.
With --json there is one object a line: policy, capacity, blocks (accesses), block_hit_rate, touch_us.
"""
_POLICIES = "fifo, lru, lfu, lru-2, sieve, s3-fifo, w-tinylfu, ours, optimum, infinite"
_REQUESTS = 10_000
_MOST_REQUESTS = 1_000_000
_SEED = 1


def add_parser(verbs: Verbs) -> None:
    """Add this verb to the command line."""
    summary = "replay traffic through the product's eviction policy, the textbook's, and the optimum"
    parser = add_verb(verbs, "simulate", summary=summary, examples=EXAMPLES)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--trace", type=path, metavar="FILE", help="traffic of yours, in Mooncake's format")
    source.add_argument("--generate", metavar="KIND", help="made-up traffic: zipf, chat or agent")
    made = parser.add_argument_group("with --generate")
    made.add_argument("--seed", type=int, metavar="N", help=f"same seed, same bytes (default {_SEED})")
    made.add_argument(
        "--requests",
        type=positive,
        metavar="N",
        help=f"how many, up to {_MOST_REQUESTS:,} (default {_REQUESTS:,})",
    )
    made.add_argument("--out", type=path, metavar="FILE", help="write the trace there")
    parser.add_argument(
        "--capacity",
        type=_capacities,
        default=(),
        metavar="N[,N…]",
        help="of the cache, in blocks of the trace",
    )
    parser.add_argument(
        "--policy", default="all", metavar="NAME[,NAME…]", help=f"of {_POLICIES}; or all (default)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a policy instead of tables")
    parser.add_argument("--plot", type=path, metavar="FILE", help="draw the hit rates: a .png or .svg file")
    parser.set_defaults(handler=run)


def run(arguments: argparse.Namespace) -> int:
    """Write, replay, or both."""
    from scripts.plots import check_plot_path

    _check(arguments)
    policies = policies_from(arguments.policy, table=not arguments.json)
    if arguments.plot:
        check_plot_path(arguments.plot)
    if arguments.out:
        _write(arguments)
    if arguments.capacity:
        _simulate(arguments, policies)
    return 0


def policies_from(text: str, *, table: bool) -> tuple[str, ...]:
    """Names of policies, each once; a table of all has a line more, for a cache without bound."""
    from scripts.simulate.policies import CONTESTANTS, INFINITE

    if text.strip().lower() == "all":
        return tuple(name for name in CONTESTANTS if table or name != INFINITE)
    plain = {_plain(name): name for name in CONTESTANTS}
    names = [plain.get(_plain(word), "") for word in text.split(",")]
    if "" in names:
        wrong = text.split(",")[names.index("")].strip()
        raise UsageError(f"--policy: {wrong!r} is none of {', '.join(CONTESTANTS)}, all")
    return tuple(dict.fromkeys(names))


def _plain(name: str) -> str:
    """A policy's name as people may spell it."""
    return name.strip().lower().replace("-", "").replace("_", "")


def _simulate(arguments: argparse.Namespace, policies: Sequence[str]) -> None:
    from scripts.simulate import report

    trace = _trace(arguments)
    if not arguments.json:
        report.show_trace(trace)
    measured: list[Measured] = []
    for capacity in arguments.capacity:
        here: list[Measured] = []
        for one in _replays(trace, policies, capacity):
            here.append(one)
            if arguments.json:
                say(report.json_line(one))
        if not arguments.json:
            report.show_capacity(here)
        measured += here
    if not arguments.json:
        report.show_plot(measured)
    if arguments.plot:
        report.save_plot(arguments.plot, measured, title=trace.title)
        if not arguments.json:
            say(f"plot written to {arguments.plot}")


def _replays(trace: "Trace", policies: Sequence[str], capacity: int) -> "Iterator[Measured]":
    """One policy after the other, with a bar for each."""
    from scripts.simulate.replay import replay

    for policy in policies:
        with progress_aside(f"{policy} at {capacity:,}", total=trace.blocks) as advance:
            one = replay(trace, policy, capacity=capacity, advance=advance)
        yield one


def _trace(arguments: argparse.Namespace) -> "Trace":
    from scripts.simulate.trace_file import read_trace, size_of, trace_of

    if arguments.trace is not None:
        with progress_aside(f"reading {arguments.trace.name}", total=size_of(arguments.trace)) as advance:
            return read_trace(arguments.trace, advance=advance)
    title = f"{arguments.generate}, seed {_seed(arguments)}"
    with progress_aside(f"making {title}", total=_requests(arguments)) as advance:
        return trace_of(title, _made(arguments, advance))


def _write(arguments: argparse.Namespace) -> None:
    from scripts.simulate.trace_file import write_trace

    with progress_aside(f"writing {arguments.out.name}", total=_requests(arguments)) as advance:
        write_trace(arguments.out, _made(arguments, advance))
    if arguments.out.is_file() and not arguments.out.is_symlink() and not arguments.json:
        say(f"{_requests(arguments):,} requests written to {arguments.out}")


def _made(arguments: argparse.Namespace, advance: Callable[[int], None]) -> "Iterator[Request]":
    from scripts.simulate.generate import generate

    for request in generate(arguments.generate, seed=_seed(arguments), requests=_requests(arguments)):
        advance(1)
        yield request


def _seed(arguments: argparse.Namespace) -> int:
    return _SEED if arguments.seed is None else int(arguments.seed)


def _requests(arguments: argparse.Namespace) -> int:
    return _REQUESTS if arguments.requests is None else int(arguments.requests)


def _check(arguments: argparse.Namespace) -> None:
    """UsageError for options that do not go together."""
    if arguments.trace is not None:
        for option in ("seed", "requests", "out"):
            if getattr(arguments, option) is not None:
                raise UsageError(f"--{option} goes with --generate, not with --trace")
    else:
        from scripts.simulate.generate import KINDS

        if arguments.generate not in KINDS:
            raise UsageError(f"--generate: {arguments.generate!r} is none of {', '.join(KINDS)}")
        if _requests(arguments) > _MOST_REQUESTS:
            raise UsageError(f"--requests: must be at most {_MOST_REQUESTS}, got {_requests(arguments)}")
    if not arguments.capacity and arguments.out is None:
        raise UsageError("name the sizes of the cache to try, in blocks: --capacity N[,N…]")
    if not arguments.capacity and (arguments.plot or arguments.json):
        raise UsageError("--plot and --json show what --capacity N[,N…] finds: name the sizes")


def _capacities(text: str) -> tuple[int, ...]:
    """Whole numbers of at least 1, each once."""
    return tuple(dict.fromkeys(positive(word) for word in text.split(",")))
