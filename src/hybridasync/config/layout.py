"""Relations between settings of engines, ports and nodes. Each check is pure; its docstring is its reason."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from urllib.parse import urlsplit

from hybridasync.config.findings import Finding, Refuse, Warn
from hybridasync.config.models import Config
from hybridasync.config.names import is_written

_LAST_PORT = 65535
_LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
_REPLICAS = ("--dp", "--dp-size", "--data-parallel-size", "--pp-size", "--pipeline-parallel-size")


def engine_urls(config: Config) -> Iterator[Finding]:
    """Each engine has an address of its own: one listed twice would be paused twice and resumed once."""
    for name, urls in (("engine.url", config.engine.url), ("engine.sidecar_url", config.engine.sidecar_url)):
        for url in urls:
            if problem := _url_problem(url):
                yield Refuse(name, f"{url!r} {problem}; an address looks like http://10.0.0.2:30000")
        twice = [url for url, count in Counter(url.rstrip("/") for url in urls).items() if count > 1]
        if twice:
            yield Refuse(name, f"lists {', '.join(twice)} more than once")


def engine_kind_needs(config: Config) -> Iterator[Finding]:
    """Each kind of engine needs something of its own."""
    engine = config.engine
    if config.run.debug_train_only:
        return
    if engine.kind == "attach" and not (engine.url or engine.sidecar_url):
        yield Refuse("engine.url", "kind attach needs the addresses of the servers: url is empty")
    if engine.kind != "attach" and engine.url:
        yield Refuse("engine.url", f"is for kind attach; kind is {engine.kind}")
    if engine.kind == "sglang" and not (engine.python or engine.sidecar_url):
        yield Refuse(
            "engine.python",
            "kind sglang needs the Python interpreter of the environment that SGLang is installed in (it has its own, "
            "because its pinned packages differ)",
        )
    if engine.kind != "sglang":
        for setting in ("python", "args", "env"):
            if getattr(engine, setting):
                yield Warn(f"engine.{setting}", f"has no effect: it is for kind sglang, and kind is {engine.kind}")
    if engine.kind == "sglang" and engine.device == "cpu" and config.rollout.deterministic:
        yield Refuse(
            "rollout.deterministic",
            'SGLang has no deterministic inference on a CPU: set it to false, or take engine.kind = "embedded"',
        )
    if engine.kind == "embedded" and engine.tensor_parallel_size > 1:
        yield Refuse(
            "engine.tensor_parallel_size",
            f"{engine.tensor_parallel_size}: an embedded engine runs on one device; use 1",
        )


def enough_engines(config: Config) -> Iterator[Finding]:
    """A run that could never be healthy is refused."""
    engine = config.engine
    if engine.min_healthy_engines > engine.num_engines:
        yield Refuse(
            "engine.min_healthy_engines", f"{engine.min_healthy_engines} is more than there are ({engine.num_engines})"
        )
    apart = config.eval.eval_engines
    if apart != "shared" and apart >= engine.num_engines:
        yield Refuse(
            "eval.eval_engines",
            f"{apart} of {engine.num_engines} would leave none for the rollout: more engine.num_engines, or shared",
        )


def engine_devices(config: Config) -> Iterator[Finding]:
    """Listed devices are enough for all engines, and none is listed twice."""
    engine = config.engine
    needed = engine.num_engines * engine.tensor_parallel_size
    if not engine.gpu_ids:
        return
    if engine.device == "cpu":
        yield Warn("engine.gpu_ids", "has no effect: engine.device is cpu")
    elif len(set(engine.gpu_ids)) != len(engine.gpu_ids) or min(engine.gpu_ids) < 0:
        yield Refuse("engine.gpu_ids", f"wants distinct device numbers from 0, got {list(engine.gpu_ids)}")
    elif len(engine.gpu_ids) != needed:
        yield Refuse(
            "engine.gpu_ids",
            f"lists {len(engine.gpu_ids)} devices; num_engines {engine.num_engines} × tensor_parallel_size "
            f"{engine.tensor_parallel_size} = {needed}",
        )


def ports_are_apart(config: Config) -> Iterator[Finding]:
    """Ports counted up from a first one stay in range and off each other."""
    count = config.engine.num_engines
    launched = [] if config.engine.sidecar_url else [("engine.sidecar_port", config.engine.sidecar_port, count)]
    if config.engine.kind != "attach" and not config.engine.sidecar_url:
        launched.append(("engine.port", config.engine.port, count))
    taken = [(name, first, n) for name, first, n in launched if first]
    if config.network.master_port:
        taken.append(("network.master_port", config.network.master_port, 1))
    for name, first, n in taken:
        if first + n - 1 > _LAST_PORT:
            yield Refuse(name, f"{first} + {n} is beyond the last port, {_LAST_PORT}")
    for (a, a_first, a_n), (b, b_first, b_n) in itertools.combinations(taken, 2):
        if a_first < b_first + b_n and b_first < a_first + a_n:
            yield Refuse(a, f"ports {_span(a_first, a_n)} overlap {b} ({_span(b_first, b_n)})")


def transport_reaches_engines(config: Config) -> Iterator[Finding]:
    """Weights that are sent need a way to every engine, and one receiver for each tensor-parallel rank."""
    publication, engine = config.publication, config.engine
    if publication.transport == "disk":
        if is_written(config, "publication.bucket_mib"):
            yield Warn("publication.bucket_mib", "has no effect: publication.transport is disk")
        return
    elsewhere = [url for url in (*engine.url, *engine.sidecar_url) if not _is_local(url)]
    if publication.transport == "collective" and config.network.interface == "lo" and elsewhere:
        yield Refuse(
            "network.interface",
            f"lo, but publication.transport is collective and {elsewhere[0]} is on another machine: name the interface "
            "at which engines can reach this one, or use transport tensor",
        )
    given = [argument.partition("=")[0] for argument in engine.args]
    if several := [name for name in _REPLICAS if name in given]:
        yield Refuse(
            "publication.transport",
            f"{publication.transport} reaches the tensor-parallel ranks of one replica, and engine.args has "
            f"{several[0]}: use transport disk, or several engines",
        )


def several_nodes_meet(config: Config) -> Iterator[Finding]:
    """Nodes meet at an address and a port that all of them can reach and know beforehand."""
    network = config.network
    if network.nnodes == 1:
        return
    if network.nnodes > config.parallel.num_workers + 1:
        yield Refuse(
            "network.nnodes",
            f"{network.nnodes} nodes, but only {config.parallel.num_workers} workers (parallel.num_workers) and one "
            "controller",
        )
    if network.master_port == 0:
        yield Refuse("network.master_port", f"{network.nnodes} nodes need a fixed port to meet at: for example 29500")
    if network.interface == "lo":
        yield Warn(
            "network.interface", f"lo with {network.nnodes} nodes: works only if all of them are on this machine"
        )


def _is_local(url: str) -> bool:
    return any(urlsplit(url).netloc.startswith(host) for host in _LOOPBACK)


def _span(first: int, count: int) -> str:
    return str(first) if count == 1 else f"{first}-{first + count - 1}"


def _url_problem(url: str) -> str | None:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        return f"isn't an address ({error})"
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return "isn't an http address"
    return "has no port" if port is None and parts.scheme == "http" else None
