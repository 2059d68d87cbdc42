"""What an operator may set: per model in config.pbtxt parameters, per node in tensorcache.toml.

Two files, because two people write them: whoever may load a model may also send Triton a changed
config.pbtxt, so nothing that trust, secrets or the memory of the node depend on is read from there.

Everything is checked here, once; a value that is wrong, unknown or out of range is a ConfigError of one line.
"""

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_type_hints

import msgspec

from backend.errors import ConfigError
from backend.parsing.limits import FORWARDED_HEADERS
from backend.scheduler import SchedulerLimits
from cachemgr import CacheError, CacheSettings, ClusterSettings, LmdbTierSettings, RedisTierSettings
from engines import EngineOptions, TrustSettings

S = TypeVar("S", bound=msgspec.Struct)
T = TypeVar("T")

TRITON_KEYS = frozenset({"EXECUTION_ENV_PATH", "FORCE_CPU_ONLY_INPUT_TENSORS", "TRITON_BATCH_STRATEGY_PATH"})
"""Parameters that Triton itself and its Python backend read."""

ACL_FILE = "acl.toml"
"""Beside tensorcache.toml it is in force without being named."""

_AT = re.compile(r" - at `\$\.?([^`]*)`")
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`")
_CHOICE = re.compile(r"Invalid enum value (.*)")
_GOT = re.compile(r", got `[^`]*`")
_SHOWN = 300
_RecheckSeconds = Annotated[float, msgspec.Meta(gt=0, le=86_400)]
_RehashSeconds = Annotated[float, msgspec.Meta(gt=0, le=31_536_000)]
_HeaderName = Annotated[str, msgspec.Meta(pattern="^[A-Za-z0-9!#$%&'*+.^_|~-]{1,128}$")]


class ModelSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Parameters of a decoder's config.pbtxt. `None`: what the release says. Chunks are tokens per step.

    `max_prompt_bytes`: of text_input or messages, before they become tokens; None: 32 per position.

    `drain_s`: what open streams have to end when the backend closes, or before a swap that drains.
    `watchdog_s`: how long one step may take before the step loop counts as stuck; it beats once a second.
    """

    lanes: Annotated[int, msgspec.Meta(ge=1, le=1024)] | None = None
    threads: Annotated[int, msgspec.Meta(ge=0, le=1024)] = 0
    max_seq_len: Annotated[int, msgspec.Meta(ge=16)] | None = None
    max_queue_size: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)] = 256
    prefill_chunk_tokens: Annotated[int, msgspec.Meta(ge=2)] = 128
    idle_chunk_tokens: Annotated[int, msgspec.Meta(ge=2)] = 256
    default_max_tokens: Annotated[int, msgspec.Meta(ge=1)] = 256
    max_prompt_bytes: Annotated[int, msgspec.Meta(ge=1, le=1 << 28)] | None = None
    cache: Literal["on", "off"] = "on"
    lane_ttl_s: Annotated[float, msgspec.Meta(ge=0)] = 30.0
    drain_s: Annotated[float, msgspec.Meta(ge=0, le=3600)] = 20.0
    swap: Literal["side_by_side", "drain", "off"] = "side_by_side"
    swap_poll_s: Annotated[float, msgspec.Meta(ge=0.05, le=3600)] = 1.0
    watchdog_s: Annotated[float, msgspec.Meta(ge=2, le=3600)] = 4.0
    sampler: Literal["auto", "host", "device"] = "auto"
    device: Annotated[int, msgspec.Meta(ge=0, le=255)] = 0
    cuda_graphs: bool = True
    recheck_s: _RecheckSeconds = 300.0
    rehash_s: _RehashSeconds = 86_400.0
    recheck_unready: bool = False
    tp_size: Annotated[int, msgspec.Meta(ge=1)] = 1

    def engine_options(self) -> EngineOptions:
        """The part an engine is opened with: it gets no prefill longer than the largest chunk of a step."""
        return EngineOptions(
            threads=self.threads,
            lanes=self.lanes,
            max_seq_len=self.max_seq_len,
            max_prefill_tokens=max(self.idle_chunk_tokens, self.prefill_chunk_tokens),
            device=self.device,
            cuda_graphs=self.cuda_graphs,
        )

    def limits(self) -> SchedulerLimits:
        """The part the scheduler keeps."""
        return SchedulerLimits(
            max_queue_size=self.max_queue_size,
            prefill_chunk_tokens=self.prefill_chunk_tokens,
            idle_chunk_tokens=self.idle_chunk_tokens,
        )


class FacadeSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Parameters of a facade's config.pbtxt: the decoder it asks, and how many requests may be open."""

    facade_for: Annotated[str, msgspec.Meta(min_length=1)]
    max_open_requests: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 64
    answer_timeout_s: Annotated[float, msgspec.Meta(gt=0, le=86400)] = 300.0


class _Node(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    cluster: str = "local"
    id: str = "node-1"


class _Frontend(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    forwarded_headers: tuple[_HeaderName, ...] = tuple(FORWARDED_HEADERS)


class _Trust(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    keys: tuple[str, ...] = ()
    min_release: dict[str, Annotated[int, msgspec.Meta(ge=0)]] = {}
    recheck_s: _RecheckSeconds | None = None
    rehash_s: _RehashSeconds | None = None
    recheck_unready: bool = False


class _Secrets(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dir: str = "secrets"
    secret_group: str = ""
    grace_s: Annotated[float, msgspec.Meta(ge=0, le=31_536_000)] = 86_400.0


class _Access(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    acl: str = ""
    public_dir: Annotated[str, msgspec.Meta(min_length=1)] = "public"


class _Host(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    bytes: Annotated[int, msgspec.Meta(ge=0)] | None = None
    arena_bytes: Annotated[int, msgspec.Meta(ge=0)] | None = None
    ttl_s: Annotated[float, msgspec.Meta(gt=0)] = 3600.0
    directory: str = "/dev/shm"


class _Log(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    level: Literal["info", "debug"] = "info"


class _NodeFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    node: _Node = _Node()
    frontend: _Frontend = _Frontend()
    trust: _Trust = _Trust()
    secrets: _Secrets = _Secrets()
    access: _Access = _Access()
    host: _Host = _Host()
    cluster: ClusterSettings = ClusterSettings()
    redis: RedisTierSettings = RedisTierSettings()
    lmdb: LmdbTierSettings = LmdbTierSettings()
    log: _Log = _Log()


_SECTIONS = {"cluster": ClusterSettings, "redis": RedisTierSettings, "lmdb": LmdbTierSettings}
_NEEDED = {"redis": "url", "lmdb": "path"}
"""Without it there is no such tier: who sets anything else there meant to have one."""


class SecretsSettings(msgspec.Struct, frozen=True):
    """Where secrets lie, and who else may read them.

    `group`: name of the one group that may, "" for none. `grace_s`: how long after a newer tag secret came up
    blocks of an older one are still read.
    """

    dir: Path
    group: str = ""
    grace_s: float = 86_400.0


class AccessSettings(msgspec.Struct, frozen=True):
    """`acl`: who may do what; None: everybody infers. `public_dir`: where public prefixes are kept.

    `awaited`: where an acl file is obeyed as soon as it appears.
    """

    acl: Path | None = None
    public_dir: Path = Path("public")
    awaited: Path | None = None


class RecheckSettings(msgspec.Struct, frozen=True):
    """What a model's own settings may make stricter, and never laxer: see ModelSettings."""

    recheck_s: float | None = None
    rehash_s: float | None = None
    unready: bool = False


class NodeSettings(msgspec.Struct, frozen=True):
    """tensorcache.toml, with paths made absolute.

    `forwarded_headers`: names, in lower case, of the headers that Triton is told to hand on as parameters.
    `log_level`: "debug" explains every decision of the cache.
    """

    trust: TrustSettings
    secrets: SecretsSettings
    cache: CacheSettings
    access: AccessSettings = AccessSettings()
    cluster: ClusterSettings = ClusterSettings()
    redis: RedisTierSettings = RedisTierSettings()
    lmdb: LmdbTierSettings = LmdbTierSettings()
    recheck: RecheckSettings = RecheckSettings()
    log_level: str = "info"
    forwarded_headers: frozenset[str] = FORWARDED_HEADERS


def read_model_settings(parameters: Mapping[str, str]) -> ModelSettings:
    """Settings of a decoder from config.pbtxt parameters (name → text)."""
    settings = _convert(_own(parameters), ModelSettings, where="config.pbtxt parameter")
    if settings.tp_size != 1:
        problem = "tensor parallelism is not supported, a model must fit one device"
        raise ConfigError(
            f"config.pbtxt parameter tp_size: expected 1 ({problem}), found {parameters['tp_size']!r}"
        )
    return settings


def read_facade_settings(parameters: Mapping[str, str]) -> FacadeSettings:
    """Settings of a facade from config.pbtxt parameters (name → text)."""
    return _convert(_own(parameters), FacadeSettings, where="config.pbtxt parameter")


def read_node_settings(path: Path) -> NodeSettings:
    """Settings of the node; paths in the file are relative to it."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: expected a readable tensorcache.toml, found: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # not UTF-8, not TOML, or too much of it
        raise ConfigError(f"{path}: expected TOML, found: {_line(error)}") from None
    root = path.resolve().parent
    _check_sections(data, path)
    try:
        file = _convert(data, _NodeFile, where=f"{path}:")
        cache = CacheSettings(
            cluster=file.node.cluster,
            node=file.node.id,
            host_bytes=file.host.bytes,
            arena_bytes=file.host.arena_bytes,
            ttl_s=file.host.ttl_s,
            directory=str(root / file.host.directory),
        )
    except CacheError as error:
        raise ConfigError(f"{path}: {error}") from None
    keys = tuple(root / key for key in file.trust.keys)
    return NodeSettings(
        trust=TrustSettings(keys, dict(file.trust.min_release)),
        secrets=SecretsSettings(
            root / file.secrets.dir, group=file.secrets.secret_group, grace_s=file.secrets.grace_s
        ),
        access=_access(root, file.access),
        recheck=RecheckSettings(file.trust.recheck_s, file.trust.rehash_s, file.trust.recheck_unready),
        cache=cache,
        cluster=_anchored(file.cluster, root, "state_dir", "tls_cert", "tls_key", "tls_ca"),
        redis=_anchored(file.redis, root, "password_file"),
        lmdb=_anchored(file.lmdb, root, "path"),
        log_level=file.log.level,
        forwarded_headers=frozenset(name.lower() for name in file.frontend.forwarded_headers),
    )


def _access(root: Path, said: _Access) -> AccessSettings:
    """The acl file that is named, else the one that lies beside: who puts it there wants it obeyed."""
    public, beside = root / said.public_dir, root / ACL_FILE
    if said.acl:
        return AccessSettings(root / said.acl, public)
    if beside.exists() or beside.is_symlink():
        return AccessSettings(beside, public)
    return AccessSettings(None, public, awaited=beside)


def _check_sections(data: Mapping[str, Any], path: Path) -> None:
    """What a section says of its own fields, with the section's name before it."""
    for section, kind in _SECTIONS.items():
        try:
            settings = msgspec.convert(data.get(section, {}), kind)
        except CacheError as error:
            raise ConfigError(f"{path}: {section}.{error}") from None
        except msgspec.ValidationError:
            continue  # found again, and named, when the whole file is read
        needed = _NEEDED.get(section)
        others = [key for key in data.get(section, {}) if key != needed]
        if needed and others and not settings.enabled:
            raise ConfigError(f"{path}: {section}.{needed}: must be set where {others[0]} is")


def _anchored(section: S, root: Path, *names: str) -> S:
    """The paths in it made absolute."""
    files = {name: getattr(section, name) for name in names}
    return msgspec.structs.replace(
        section, **{name: str(root / file) for name, file in files.items() if file}
    )


def _own(parameters: Mapping[str, str]) -> dict[str, str]:
    return {key: value for key, value in parameters.items() if key not in TRITON_KEYS}


def _convert(data: Mapping[str, Any], kind: type[T], *, where: str) -> T:
    """Texts become numbers where the field is one; the error names key, limit and value."""
    try:
        return msgspec.convert(data, kind, strict=where.endswith(":"))
    except UnicodeEncodeError as error:
        raise ConfigError(f"{where} expected text that UTF-8 can carry, found: {_line(error)}") from None
    except msgspec.ValidationError as error:
        text = str(error)
    at = _AT.search(text)
    key, problem = (at.group(1), text[: at.start()]) if at else ("", text)
    if unknown := _UNKNOWN.fullmatch(problem):
        key, problem = f"{key}.{unknown.group(1)}".lstrip("."), "unknown key"
    elif choice := _CHOICE.fullmatch(problem):
        allowed = " or ".join(get_args(_hint(kind, key)))
        problem = f"expected {allowed or 'another value'}, found {choice.group(1)}"
    else:
        expected = (
            _GOT.sub("", problem).replace("Expected", "expected").replace("`", "").replace(" | null", "")
        )
        problem = expected + _found(data, key)
    raise ConfigError(f"{where} {_line(key)}: {_line(problem)}")


def _line(text: object) -> str:
    """As it is if that is one line of bearable length, else as an escaped one, cut."""
    line = str(text)
    if not line.isprintable():
        line = ascii(line)
    return line if len(line) <= _SHOWN else f"{line[:_SHOWN]}… ({len(line)} characters)"


def _hint(kind: Any, key: str) -> Any:
    """The type of a field, by the path of its key."""
    for part in key.split("."):
        kind = get_type_hints(kind).get(part)
    return kind


def _found(data: Any, key: str) -> str:
    for part in key.split("."):
        if not isinstance(data, Mapping) or part not in data:
            return ""
        data = data[part]
    return f", found {data!r}"
