"""The composition root: wires a decoder together. It and its two parts alone name implementations.

release_opener   verified release → engine (warm, golden token answered) → cache → OpenRelease
process          replies, step loop, admission, metrics: what there is once, whichever release serves
here             both, and swapper, recheck → DecoderService
"""

import logging
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from backend.access import Access, await_acl, open_access, open_acl_access
from backend.admin import AdminDesk, Administrator, NoCommands, PublicPrefixes
from backend.first_release import open_first
from backend.metrics import Instruments, Reading
from backend.open_release import OpenRelease
from backend.parsing.limits import FORWARDED_HEADERS
from backend.process import Clock, Process
from backend.recheck import Recheck
from backend.release_opener import ReleaseOpener
from backend.service import DecoderService
from backend.settings import ModelSettings, NodeSettings
from backend.swapper import Swapper, SwapSettings
from backend.text import TextModel
from cachemgr import (
    Beyond,
    CacheSecrets,
    NothingBeyond,
    PrefixCache,
    SecretsError,
    probe_secret,
    reach_beyond,
)
from engines import Engine, at_once, give_back_freed_memory

log = logging.getLogger(__name__)


def open_decoder(
    model: str,
    version_dir: Path,
    *,
    settings: ModelSettings,
    node: NodeSettings,
    instruments: Instruments,
    labels: Mapping[str, str],
    access: Access | None = None,
) -> DecoderService:
    """Load the current release of `version_dir` and put it in service. `access` None: as the node says."""
    process = Process.around(settings, instruments, labels, forwarded_headers=node.forwarded_headers)
    with ExitStack() as undo:
        access = access or _access(node, model)
        undo.callback(access.authoriser.close)
        access.authoriser.follow(process.tenancy.set_shares)
        public = PublicPrefixes(node.access.public_dir, model)
        undo.callback(public.close)
        public.follow(process.tenancy.set_public)
        public.start()
        beyond = _reach(node, settings, process)
        undo.callback(beyond.close)
        admin = AdminDesk(public, shares=lambda: process.tenancy.shares, hot=beyond.hot)
        opener = ReleaseOpener(model, version_dir, node=node, beyond=beyond, process=process)
        if settings.swap == "off":  # whoever loads wants this one
            serving = opener.current(beside=None, run=at_once)
        else:
            serving = open_first(opener, version_dir, run=at_once)
        undo.pop_all()
    give_back_freed_memory()
    loop, admission, watchdog = process.start_serving(serving, access, admin)
    recheck = Recheck(
        trust=node.trust,
        recheck_s=min(settings.recheck_s, node.recheck.recheck_s or settings.recheck_s),
        rehash_s=min(settings.rehash_s, node.recheck.rehash_s or settings.rehash_s),
        unready=settings.recheck_unready or node.recheck.unready,
    )
    process.ledger.open(recheck, recheck.readings)

    def watch(now: OpenRelease) -> None:
        if now.facts is not None:
            recheck.watch(now.facts)

    watch(serving)
    swapper = Swapper(
        serving,
        version_dir,
        settings=SwapSettings(settings.swap, settings.swap_poll_s, settings.drain_s),
        opener=opener,
        loop=loop,
        admission=admission,
        metrics=process.metrics,
        now_serves=watch,
    )
    return DecoderService(
        serving, loop=loop, admission=admission, replies=process.replies, watchdog=watchdog,
        drain_s=settings.drain_s, swapper=swapper, recheck=recheck, beyond=beyond,
        follows=(access.authoriser.close, public.close),
    )  # fmt: skip


def _access(node: NodeSettings, model: str) -> Access:
    """Who may do what with the model. ConfigError for an acl file that cannot be obeyed: nobody gets in."""
    path = node.access.acl or node.access.awaited
    if path is None:
        return open_access(model)
    open_now = await_acl if node.access.acl is None else open_acl_access
    try:
        secrets = CacheSecrets.load(node.secrets.dir, group=node.secrets.group, grace_s=node.secrets.grace_s)
    except SecretsError as error:
        log.warning("the node's own probes are not let in: %s", error)
        return open_now(model, path)
    return open_now(model, path, probe_secret=probe_secret(secrets))


def _reach(node: NodeSettings, settings: ModelSettings, process: Process) -> Beyond:
    """A model without a cache has nothing to share."""
    beyond = (
        NothingBeyond()
        if settings.cache == "off"
        else reach_beyond(node.cache, node.cluster, redis=node.redis, lmdb=node.lmdb)
    )
    process.ledger.open(
        beyond,
        lambda: [
            Reading(name, value, tier)
            for tier, counters in beyond.counters().items()
            for name, value in counters.items()
        ],
    )
    return beyond


def wire(
    engine: Engine,
    cache: PrefixCache,
    *,
    text: TextModel,
    settings: ModelSettings,
    access: Access,
    instruments: Instruments,
    labels: Mapping[str, str],
    admin: Administrator | None = None,
    forwarded_headers: frozenset[str] = FORWARDED_HEADERS,
    clock: Clock = time.monotonic,
) -> DecoderService:
    """Everything between a request and an engine that is open already, started. It serves no other."""
    process = Process.around(settings, instruments, labels, forwarded_headers=forwarded_headers, clock=clock)
    serving = process.assemble(engine, cache, text=text)
    loop, admission, watchdog = process.start_serving(serving, access, admin or NoCommands())
    return DecoderService(
        serving, loop=loop, admission=admission, replies=process.replies, watchdog=watchdog,
        drain_s=settings.drain_s,
    )  # fmt: skip
